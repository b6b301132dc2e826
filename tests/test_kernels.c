/* SPDX-License-Identifier: MIT */
/*
 * Every kernel of kernels.def on every ISA: suite <op>, test <isa>. Each call is
 * watched for what the calling convention promises.
 */
#include "abi.h"
#include "checks.h"

static void run(int id, const char *op, void (*check)(const test_isa *))
{
    test_isa isa = test_isa_of(id);
    if (isa.missing) {
        skip_test("%s: %s", isa.name, isa.missing);
        return;
    }
    context("%s on %s", op, isa.name);
    cr_log_info("%s runs on %s", op, isa.name);
    isa.table = abi_watched(isa.table);
    check(&isa);
}

_Static_assert(QKV_ISA_COUNT == 4 && TEST_ISA_COUNT == 7, "give the new ISA its cases below");

#define CASE(op, isa)                                                                              \
    Test(op, isa)                                                                                  \
    {                                                                                              \
        run(TEST_ISA_##isa, #op, check_##op);                                                      \
    }
#define QKV_KERNEL(op, ...)                                                                        \
    CASE(op, scalar)                                                                               \
    CASE(op, avx2)                                                                                 \
    CASE(op, avx512)                                                                               \
    CASE(op, neon)                                                                                 \
    CASE(op, avx2_simde)                                                                           \
    CASE(op, avx512_simde)                                                                         \
    CASE(op, neon_simde)
#include "kernels.def"
#undef QKV_KERNEL
