/* SPDX-License-Identifier: MIT */
/*
 * The table of one ISA's kernels as compiled through SIMDe. The build
 * renames every qkv_<op>_<isa> of this file and of the kernels' files to
 * qkv_<op>_<isa>_simde, so that they may lie beside the real ones.
 */
#include "tables.h"

#if defined(TEST_TABLE_AVX2)
extern const qkv_kernels test_table_avx2_simde;
#define QKV_KERNEL(op, scalar, avx2, avx512, neon) .op = qkv_##op##_##avx2,
const qkv_kernels test_table_avx2_simde = {QKV_TABLE_HEAD(avx2)
#elif defined(TEST_TABLE_AVX512)
extern const qkv_kernels test_table_avx512_simde;
#define QKV_KERNEL(op, scalar, avx2, avx512, neon) .op = qkv_##op##_##avx512,
const qkv_kernels test_table_avx512_simde = {QKV_TABLE_HEAD(avx512)
#elif defined(TEST_TABLE_NEON)
extern const qkv_kernels test_table_neon_simde;
#define QKV_KERNEL(op, scalar, avx2, avx512, neon) .op = qkv_##op##_##neon,
const qkv_kernels test_table_neon_simde = {QKV_TABLE_HEAD(neon)
#endif
#include "kernels.def"
};
