/* SPDX-License-Identifier: MIT */
#include "isas.h"

/* Tables that simde_table.c defines where the build found SIMDe. */
extern const qkv_kernels test_table_avx2_simde, test_table_avx512_simde, test_table_neon_simde;

static const char *const native_names[QKV_ISA_COUNT] = {
#define QKV_ISA(name, ...) #name,
#include "isas.def"
#undef QKV_ISA
};

static test_isa native(int id)
{
    test_isa isa = {.id = id, .name = native_names[id], .table = qkv_kernels_of(id)};
    isa.missing = qkv_isas_detect().missing[id];
    if (!isa.missing && !isa.table)
        isa.missing = "not compiled into this library";
    if (isa.missing)
        isa.table = NULL;
    return isa;
}

/* On x86-64 SIMDe's code is compiled for AVX2 and FMA, so that a fused
 * multiply-add stays fused. */
static const char *simde_needs(void)
{
#if defined(__x86_64__)
    return qkv_isas_detect().missing[QKV_ISA_avx2];
#else
    return NULL;
#endif
}

static test_isa through_simde(int id, const char *name, const qkv_kernels *table,
                              const char *not_built)
{
    test_isa isa = {.id = id, .name = name, .table = table, .missing = not_built};
    if (!isa.missing)
        isa.missing = simde_needs();
    if (isa.missing)
        isa.table = NULL;
    return isa;
}

test_isa test_isa_of(int id)
{
    switch (id) {
    case TEST_ISA_avx2_simde:
#ifdef TEST_SIMDE_AVX2
        return through_simde(id, "avx2 (SIMDe)", &test_table_avx2_simde, NULL);
#elif defined(__x86_64__)
        return through_simde(id, "avx2 (SIMDe)", NULL, "an x86-64 runs the real instructions");
#else
        return through_simde(id, "avx2 (SIMDe)", NULL, "this build found no SIMDe that serves");
#endif
    case TEST_ISA_avx512_simde:
#ifdef TEST_SIMDE_AVX512
        return through_simde(id, "avx512 (SIMDe)", &test_table_avx512_simde, NULL);
#else
        return through_simde(id, "avx512 (SIMDe)", NULL, "this build found no SIMDe that serves");
#endif
    case TEST_ISA_neon_simde:
#ifdef TEST_SIMDE_NEON
        return through_simde(id, "neon (SIMDe)", &test_table_neon_simde, NULL);
#elif defined(__aarch64__)
        return through_simde(id, "neon (SIMDe)", NULL, "an AArch64 runs the real instructions");
#else
        return through_simde(id, "neon (SIMDe)", NULL, "this build found no SIMDe that serves");
#endif
    default:
        return native(id);
    }
}
