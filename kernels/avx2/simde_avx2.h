/* SPDX-License-Identifier: MIT */
/*
 * SIMDe in place of the instructions, for tests on a foreign host. Its masked
 * loads read all lanes and mask afterwards, where the instruction touches no
 * byte of a lane that is masked off: they are written out here, lane by lane.
 */
#ifndef QKV_SIMDE_AVX2_H
#define QKV_SIMDE_AVX2_H

#define SIMDE_ENABLE_NATIVE_ALIASES
#include <simde/x86/avx2.h>
#include <simde/x86/f16c.h>
#include <simde/x86/fma.h>

static inline __m256 simde_qkv_maskload_ps(const float *p, __m256i mask)
{
    int32_t masks[8];
    float lanes[8];
    simde_mm256_storeu_si256((simde__m256i *)(void *)masks, mask);
    for (int i = 0; i < 8; i++)
        lanes[i] = masks[i] < 0 ? p[i] : 0.0f;
    return simde_mm256_loadu_ps(lanes);
}

static inline void simde_qkv_maskstore_ps(float *p, __m256i mask, __m256 x)
{
    int32_t masks[8];
    float lanes[8];
    simde_mm256_storeu_si256((simde__m256i *)(void *)masks, mask);
    simde_mm256_storeu_ps(lanes, x);
    for (int i = 0; i < 8; i++)
        if (masks[i] < 0)
            p[i] = lanes[i];
}

static inline __m128 simde_qkv_maskload4_ps(const float *p, __m128i mask)
{
    int32_t masks[4];
    float lanes[4];
    simde_mm_storeu_si128((simde__m128i *)(void *)masks, mask);
    for (int i = 0; i < 4; i++)
        lanes[i] = masks[i] < 0 ? p[i] : 0.0f;
    return simde_mm_loadu_ps(lanes);
}

#ifndef _MM_FROUND_NO_EXC /* has no alias where the compiler brings no x86 headers */
#define _MM_FROUND_NO_EXC SIMDE_MM_FROUND_NO_EXC
#endif

#undef _mm256_maskload_ps
#undef _mm256_maskstore_ps
#undef _mm_maskload_ps
#define _mm256_maskload_ps simde_qkv_maskload_ps
#define _mm256_maskstore_ps simde_qkv_maskstore_ps
#define _mm_maskload_ps simde_qkv_maskload4_ps

#endif
