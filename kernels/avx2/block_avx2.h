/* SPDX-License-Identifier: MIT */
/*
 * The register blocks of the attention tile, 4 scalars by 3 vectors, and of the
 * matrix product, 6 by 2:
 *
 *     acc[r][v] = sum over i of scalars_r[i] * vectors[i][v]
 *
 * 12 accumulators, 3 vectors and a broadcast are all 16 registers. A step has
 * 12 multiply-adds and 7 loads: 6 cycles on two FMA ports, 3.5 on two load
 * ports, 19 instructions.
 *
 * In assembly, as the compilers fail at it. From intrinsics GCC 12 and clang 14
 * choose a form of the multiply-add that overwrites an operand, copy and spill
 * accumulators, or load a vector again as the memory operand of each
 * multiply-add, 16 loads a step: that runs at about two thirds of the peak, this at 97 %.
 * Which of these they do changes with any line of the surrounding function.
 */
#ifndef QKV_BLOCK_AVX2_H
#define QKV_BLOCK_AVX2_H

#include "isa_avx2.h"

enum { BLOCK_SCALARS = 4, BLOCK_VECS = 3, BLOCK_ROW = BLOCK_VECS * LANES };

#ifdef QKV_SIMDE

QKV_INLINE void block_step(const float *const scalars[BLOCK_SCALARS], const float *vectors,
                           __m256 acc[BLOCK_SCALARS][BLOCK_VECS])
{
    for (int r = 0; r < BLOCK_SCALARS; r++)
        for (int v = 0; v < BLOCK_VECS; v++)
            acc[r][v] = _mm256_fmadd_ps(_mm256_set1_ps(*scalars[r]),
                                        _mm256_loadu_ps(vectors + v * LANES), acc[r][v]);
}

#define BLOCK_LOOP(stride, bytes)                                                                  \
    for (int r = 0; r < BLOCK_SCALARS; r++)                                                        \
        for (int v = 0; v < BLOCK_VECS; v++)                                                       \
            acc[r][v] = _mm256_setzero_ps();                                                       \
    for (int64_t i = 0; i < steps; i++) {                                                          \
        block_step((const float *[]){s0, s1, s2, s3}, vectors + i * BLOCK_ROW, acc);               \
        s0 += (stride), s1 += (stride), s2 += (stride), s3 += (stride);                            \
    }

#else

/* Multiply-adds of row r, whose scalar is in ymm15. */
#define BLOCK_FMA(r)                                                                               \
    "vfmadd231ps %%ymm12, %%ymm15, %[a" #r "0]\n\t"                                                \
    "vfmadd231ps %%ymm13, %%ymm15, %[a" #r "1]\n\t"                                                \
    "vfmadd231ps %%ymm14, %%ymm15, %[a" #r "2]\n\t"

#define BLOCK_ZERO(r)                                                                              \
    "vxorps %x[a" #r "0], %x[a" #r "0], %x[a" #r "0]\n\t"                                          \
    "vxorps %x[a" #r "1], %x[a" #r "1], %x[a" #r "1]\n\t"                                          \
    "vxorps %x[a" #r "2], %x[a" #r "2], %x[a" #r "2]\n\t"

/* Step i of an unrolled loop; 'stride' in bytes from one scalar to the next. */
#define BLOCK_STEP(i, stride)                                                                      \
    "vmovups 96*" #i "(%[vectors]), %%ymm12\n\t"                                                   \
    "vmovups 96*" #i "+32(%[vectors]), %%ymm13\n\t"                                                \
    "vmovups 96*" #i "+64(%[vectors]), %%ymm14\n\t"                                                \
    "vbroadcastss " stride "*" #i "(%[s0]), %%ymm15\n\t" BLOCK_FMA(                                \
        0) "vbroadcastss " stride "*" #i                                                           \
           "(%[s1]), %%ymm15\n\t" BLOCK_FMA(1) "vbroadcastss " stride "*" #i                       \
                                               "(%[s2]), %%ymm15\n\t" BLOCK_FMA(                   \
                                                   2) "vbroadcastss " stride "*" #i                \
                                                      "(%[s3]), %%ymm15\n\t" BLOCK_FMA(3)

#define BLOCK_MOVE(n, stride)                                                                      \
    "add $96*" #n ", %[vectors]\n\t"                                                               \
    "add $" stride "*" #n ", %[s0]\n\t"                                                            \
    "add $" stride "*" #n ", %[s1]\n\t"                                                            \
    "add $" stride "*" #n ", %[s2]\n\t"                                                            \
    "add $" stride "*" #n ", %[s3]\n\t"

/* clang-format off */
#define BLOCK_TEXT(stride)                                                                         \
    BLOCK_ZERO(0) BLOCK_ZERO(1) BLOCK_ZERO(2) BLOCK_ZERO(3)                                        \
    "sub $8, %[steps]\n\t"                                                                         \
    "jl 2f\n\t"                                                                                    \
    ".p2align 5\n"                                                                                 \
    "1:\n\t"                                                                                       \
    BLOCK_STEP(0, stride) BLOCK_STEP(1, stride) BLOCK_STEP(2, stride) BLOCK_STEP(3, stride)        \
    BLOCK_STEP(4, stride) BLOCK_STEP(5, stride) BLOCK_STEP(6, stride) BLOCK_STEP(7, stride)        \
    BLOCK_MOVE(8, stride)                                                                          \
    "sub $8, %[steps]\n\t"                                                                         \
    "jge 1b\n"                                                                                     \
    "2:\n\t"                                                                                       \
    "add $8, %[steps]\n\t"                                                                         \
    "jz 4f\n"                                                                                      \
    "3:\n\t"                                                                                       \
    BLOCK_STEP(0, stride)                                                                          \
    BLOCK_MOVE(1, stride)                                                                          \
    "dec %[steps]\n\t"                                                                             \
    "jnz 3b\n"                                                                                     \
    "4:\n\t"
/* clang-format on */

#define BLOCK_ROW_OUT(r)                                                                           \
    [a##r##0] "=&x"(acc[r][0]), [a##r##1] "=&x"(acc[r][1]), [a##r##2] "=&x"(acc[r][2])

#define BLOCK_LOOP(stride, bytes)                                                                  \
    __asm__(BLOCK_TEXT(bytes)                                                                      \
            : BLOCK_ROW_OUT(0), BLOCK_ROW_OUT(1), BLOCK_ROW_OUT(2),                                \
              BLOCK_ROW_OUT(3), [vectors] "+r"(vectors), [s0] "+r"(s0), [s1] "+r"(s1),             \
              [s2] "+r"(s2), [s3] "+r"(s3), [steps] "+r"(steps)                                    \
            :                                                                                      \
            : "xmm12", "xmm13", "xmm14", "xmm15", "cc", "memory")

#endif

/*
 * 'steps' vectors[i] from 'vectors' on; scalars_r are 'stride' floats apart
 * from s_r on: elements of a row, or of a column of a panel of 4.
 */
QKV_INLINE void block_rows(const float *s0, const float *s1, const float *s2, const float *s3,
                           const float *vectors, int64_t steps,
                           __m256 acc[BLOCK_SCALARS][BLOCK_VECS])
{
    BLOCK_LOOP(1, "4");
}

QKV_INLINE void block_panel(const float *panel, const float *vectors, int64_t steps,
                            __m256 acc[BLOCK_SCALARS][BLOCK_VECS])
{
    const float *s0 = panel, *s1 = panel + 1, *s2 = panel + 2, *s3 = panel + 3;
    BLOCK_LOOP(4, "16");
}

/* ------------------------------------------------------- 6 x 2, of a matrix product */

/*
 * The same with 6 rows of scalars, 'stride' floats apart, and 2 vectors: 12
 * multiply-adds and 8 loads a step.
 */
enum { BLOCK6_SCALARS = 6, BLOCK6_VECS = 2 };

#ifdef QKV_SIMDE

QKV_INLINE void block_6x2(const float *scalars, int64_t stride, const float *vectors, int64_t steps,
                          __m256 acc[BLOCK6_SCALARS][BLOCK6_VECS])
{
    for (int r = 0; r < BLOCK6_SCALARS; r++)
        for (int v = 0; v < BLOCK6_VECS; v++) {
            acc[r][v] = _mm256_setzero_ps();
            for (int64_t i = 0; i < steps; i++)
                acc[r][v] = _mm256_fmadd_ps(
                    _mm256_set1_ps(scalars[r * stride + i]),
                    _mm256_loadu_ps(vectors + (i * BLOCK6_VECS + v) * LANES), acc[r][v]);
        }
}

#else

#define BLOCK6_FMA(r, scalar)                                                                      \
    "vfmadd231ps %%ymm12, %%ymm" #scalar ", %[a" #r "0]\n\t"                                       \
    "vfmadd231ps %%ymm13, %%ymm" #scalar ", %[a" #r "1]\n\t"

#define BLOCK6_ZERO(r)                                                                             \
    "vxorps %x[a" #r "0], %x[a" #r "0], %x[a" #r "0]\n\t"                                          \
    "vxorps %x[a" #r "1], %x[a" #r "1], %x[a" #r "1]\n\t"

#define BLOCK6_STEP(i)                                                                             \
    "vmovups 64*" #i "(%[vectors]), %%ymm12\n\t"                                                   \
    "vmovups 64*" #i "+32(%[vectors]), %%ymm13\n\t"                                                \
    "vbroadcastss 4*" #i "(%[s0]), %%ymm14\n\t" BLOCK6_FMA(                                        \
        0, 14) "vbroadcastss 4*" #i                                                                \
               "(%[s0],%[stride]), %%ymm15\n\t" BLOCK6_FMA(                                        \
                   1, 15) "vbroadcastss 4*" #i                                                     \
                          "(%[s0],%[stride],2), %%ymm14\n\t" BLOCK6_FMA(                           \
                              2,                                                                   \
                              14) "vbroadcastss 4*" #i                                             \
                                  "(%[s3]), %%ymm15\n\t" BLOCK6_FMA(                               \
                                      3,                                                           \
                                      15) "vbroadcastss 4*" #i                                     \
                                          "(%[s3],%[stride]), %%ymm14\n\t" BLOCK6_FMA(             \
                                              4,                                                   \
                                              14) "vbroadcastss 4*" #i                             \
                                                  "(%[s3],%[stride],2), %%ymm15\n\t" BLOCK6_FMA(   \
                                                      5, 15)

#define BLOCK6_MOVE(n)                                                                             \
    "add $64*" #n ", %[vectors]\n\t"                                                               \
    "add $4*" #n ", %[s0]\n\t"                                                                     \
    "add $4*" #n ", %[s3]\n\t"

#define BLOCK6_OUT(r) [a##r##0] "=&x"(acc[r][0]), [a##r##1] "=&x"(acc[r][1])

QKV_INLINE void block_6x2(const float *scalars, int64_t stride, const float *vectors, int64_t steps,
                          __m256 acc[BLOCK6_SCALARS][BLOCK6_VECS])
{
    const float *s0 = scalars, *s3 = scalars + 3 * stride;
    /* clang-format off */
    __asm__(BLOCK6_ZERO(0) BLOCK6_ZERO(1) BLOCK6_ZERO(2)
            BLOCK6_ZERO(3) BLOCK6_ZERO(4) BLOCK6_ZERO(5)
            "sub $8, %[steps]\n\t"
            "jl 2f\n\t"
            ".p2align 5\n"
            "1:\n\t"
            BLOCK6_STEP(0) BLOCK6_STEP(1) BLOCK6_STEP(2) BLOCK6_STEP(3)
            BLOCK6_STEP(4) BLOCK6_STEP(5) BLOCK6_STEP(6) BLOCK6_STEP(7)
            BLOCK6_MOVE(8)
            "sub $8, %[steps]\n\t"
            "jge 1b\n"
            "2:\n\t"
            "add $8, %[steps]\n\t"
            "jz 4f\n"
            "3:\n\t"
            BLOCK6_STEP(0)
            BLOCK6_MOVE(1)
            "dec %[steps]\n\t"
            "jnz 3b\n"
            "4:\n\t"
            : BLOCK6_OUT(0), BLOCK6_OUT(1), BLOCK6_OUT(2), BLOCK6_OUT(3), BLOCK6_OUT(4),
              BLOCK6_OUT(5), [vectors] "+r"(vectors), [s0] "+r"(s0), [s3] "+r"(s3),
              [steps] "+r"(steps)
            : [stride] "r"(stride * (int64_t)sizeof(float))
            : "xmm12", "xmm13", "xmm14", "xmm15", "cc", "memory");
    /* clang-format on */
}

#endif

#endif
