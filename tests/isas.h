/* SPDX-License-Identifier: MIT */
/*
 * The ISAs under test: those of isas.def, as the library has them, and
 * foreign ones that run here through SIMDe. SIMDe proves a kernel's logic,
 * not its speed nor what the real instructions do with rounding.
 */
#ifndef TEST_ISAS_H
#define TEST_ISAS_H

#include "cpu.h"
#include "internal.h"

enum {
#define QKV_ISA(name, ...) TEST_ISA_##name = QKV_ISA_##name,
#include "isas.def"
#undef QKV_ISA
    TEST_ISA_avx2_simde = QKV_ISA_COUNT,
    TEST_ISA_avx512_simde,
    TEST_ISA_neon_simde,
    TEST_ISA_COUNT
};

typedef struct test_isa {
    int id;
    const char *name;         /* "avx2", "neon (SIMDe)" */
    const qkv_kernels *table; /* NULL where it cannot run */
    const char *missing;      /* why it cannot run, else NULL */
} test_isa;

test_isa test_isa_of(int id);

#endif
