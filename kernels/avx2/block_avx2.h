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

/* ------------------------------------------- up to 6 x 2, of a matrix product */

/*
 * The same with up to 6 rows of scalars, 'stride' floats apart, and 2 vectors:
 * with 6 rows 12 multiply-adds and 8 loads a step, with 5 rows 10 and 7, with 4
 * rows 8 and 6, whose 8 chains just cover a latency of 4 cycles.
 *
 * product_steps takes any number of steps from 0 on, product_8 adds 8 to what is
 * there, for a caller that does something else between them.
 */
enum { PRODUCT_ROWS = 6, PRODUCT_VECS = 2, PRODUCT_STEPS = 8 };

/* One step in intrinsics; vectors that the compiler may not load again for each row. */
QKV_INLINE void product_step(const float *scalars, int64_t stride, const float *vectors,
                             const int rows, __m256 acc[PRODUCT_ROWS][PRODUCT_VECS])
{
    __m256 w0 = _mm256_loadu_ps(vectors), w1 = _mm256_loadu_ps(vectors + LANES);
#ifndef QKV_SIMDE
    __asm__("" : "+x"(w0), "+x"(w1));
#endif
    QKV_UNROLL
    for (int r = 0; r < rows; r++) {
        const __m256 scalar = _mm256_set1_ps(scalars[r * stride]);
        acc[r][0] = _mm256_fmadd_ps(scalar, w0, acc[r][0]);
        acc[r][1] = _mm256_fmadd_ps(scalar, w1, acc[r][1]);
    }
}

QKV_INLINE void product_more(const float *scalars, int64_t stride, const float *vectors,
                             int64_t steps, const int rows, __m256 acc[PRODUCT_ROWS][PRODUCT_VECS])
{
    for (int64_t i = 0; i < steps; i++)
        product_step(scalars + i, stride, vectors + i * PRODUCT_VECS * LANES, rows, acc);
}

#ifndef QKV_SIMDE

/* clang-format off */
#define PRODUCT_LOAD(i)                                                                            \
    "vmovups 64*" #i "(%[vectors]), %%ymm12\n\t"                                                   \
    "vmovups 64*" #i "+32(%[vectors]), %%ymm13\n\t"
#define PRODUCT_ROW(i, r, at, scalar)                                                              \
    "vbroadcastss 4*" #i at ", %%ymm" #scalar "\n\t"                                               \
    "vfmadd231ps %%ymm12, %%ymm" #scalar ", %[a" #r "0]\n\t"                                       \
    "vfmadd231ps %%ymm13, %%ymm" #scalar ", %[a" #r "1]\n\t"
#define PRODUCT_4(i)                                                                               \
    PRODUCT_LOAD(i)                                                                                \
    PRODUCT_ROW(i, 0, "(%[s0])", 14) PRODUCT_ROW(i, 1, "(%[s0],%[stride])", 15)                    \
    PRODUCT_ROW(i, 2, "(%[s0],%[stride],2)", 14) PRODUCT_ROW(i, 3, "(%[s3])", 15)
#define PRODUCT_5(i) PRODUCT_4(i) PRODUCT_ROW(i, 4, "(%[s3],%[stride])", 14)
#define PRODUCT_6(i) PRODUCT_5(i) PRODUCT_ROW(i, 5, "(%[s3],%[stride],2)", 15)
#define PRODUCT_UNROLLED(step) step(0) step(1) step(2) step(3) step(4) step(5) step(6) step(7)

#define PRODUCT_ZERO(r)                                                                            \
    "vxorps %x[a" #r "0], %x[a" #r "0], %x[a" #r "0]\n\t"                                          \
    "vxorps %x[a" #r "1], %x[a" #r "1], %x[a" #r "1]\n\t"
#define PRODUCT_ZERO_4 PRODUCT_ZERO(0) PRODUCT_ZERO(1) PRODUCT_ZERO(2) PRODUCT_ZERO(3)

#define PRODUCT_MOVE(n)                                                                            \
    "add $64*" #n ", %[vectors]\n\t"                                                               \
    "add $4*" #n ", %[s0]\n\t"                                                                     \
    "add $4*" #n ", %[s3]\n\t"

#define PRODUCT_LOOP(step)                                                                         \
    "sub $8, %[steps]\n\t"                                                                         \
    "jl 2f\n\t"                                                                                    \
    ".p2align 5\n"                                                                                 \
    "1:\n\t"                                                                                       \
    PRODUCT_UNROLLED(step)                                                                         \
    PRODUCT_MOVE(8)                                                                                \
    "sub $8, %[steps]\n\t"                                                                         \
    "jge 1b\n"                                                                                     \
    "2:\n\t"                                                                                       \
    "add $8, %[steps]\n\t"                                                                         \
    "jz 4f\n"                                                                                      \
    "3:\n\t"                                                                                       \
    step(0)                                                                                        \
    PRODUCT_MOVE(1)                                                                                \
    "dec %[steps]\n\t"                                                                             \
    "jnz 3b\n"                                                                                     \
    "4:\n\t"

#define PRODUCT_OUT(how, r) [a##r##0] how(acc[r][0]), [a##r##1] how(acc[r][1])
#define PRODUCT_OUT_4(how)                                                                         \
    PRODUCT_OUT(how, 0), PRODUCT_OUT(how, 1), PRODUCT_OUT(how, 2), PRODUCT_OUT(how, 3)
#define PRODUCT_OUT_5(how) PRODUCT_OUT_4(how), PRODUCT_OUT(how, 4)
#define PRODUCT_OUT_6(how) PRODUCT_OUT_5(how), PRODUCT_OUT(how, 5)
#define PRODUCT_CLOBBERS "xmm12", "xmm13", "xmm14", "xmm15", "cc", "memory"

#define PRODUCT_STEPS_ASM(zero, step, out)                                                         \
    __asm__(zero PRODUCT_LOOP(step)                                                                \
            : out("=&x"), [vectors] "+r"(vectors), [s0] "+r"(s0), [s3] "+r"(s3),                   \
              [steps] "+r"(steps)                                                                  \
            : [stride] "r"(bytes)                                                                  \
            : PRODUCT_CLOBBERS)
#define PRODUCT_8_ASM(step, out)                                                                   \
    __asm__(PRODUCT_UNROLLED(step)                                                                 \
            : out("+x")                                                                            \
            : [vectors] "r"(vectors), [s0] "r"(s0), [s3] "r"(s3), [stride] "r"(bytes)              \
            : PRODUCT_CLOBBERS)
/* clang-format on */

QKV_INLINE void product_steps(const float *scalars, int64_t stride, const float *vectors,
                              int64_t steps, const int rows, __m256 acc[PRODUCT_ROWS][PRODUCT_VECS])
{
    const float *s0 = scalars, *s3 = scalars + 3 * stride;
    const int64_t bytes = stride * (int64_t)sizeof(float);
    if (rows == 6) {
        PRODUCT_STEPS_ASM(PRODUCT_ZERO_4 PRODUCT_ZERO(4) PRODUCT_ZERO(5), PRODUCT_6, PRODUCT_OUT_6);
    } else if (rows == 5) {
        PRODUCT_STEPS_ASM(PRODUCT_ZERO_4 PRODUCT_ZERO(4), PRODUCT_5, PRODUCT_OUT_5);
    } else if (rows == 4) {
        PRODUCT_STEPS_ASM(PRODUCT_ZERO_4, PRODUCT_4, PRODUCT_OUT_4);
    } else {
        QKV_UNROLL
        for (int r = 0; r < rows; r++)
            acc[r][0] = acc[r][1] = _mm256_setzero_ps();
        product_more(scalars, stride, vectors, steps, rows, acc);
    }
}

QKV_INLINE void product_8(const float *scalars, int64_t stride, const float *vectors,
                          const int rows, __m256 acc[PRODUCT_ROWS][PRODUCT_VECS])
{
    const float *s0 = scalars, *s3 = scalars + 3 * stride;
    const int64_t bytes = stride * (int64_t)sizeof(float);
    if (rows == 6)
        PRODUCT_8_ASM(PRODUCT_6, PRODUCT_OUT_6);
    else if (rows == 5)
        PRODUCT_8_ASM(PRODUCT_5, PRODUCT_OUT_5);
    else if (rows == 4)
        PRODUCT_8_ASM(PRODUCT_4, PRODUCT_OUT_4);
    else
        product_more(scalars, stride, vectors, PRODUCT_STEPS, rows, acc);
}

#else

QKV_INLINE void product_steps(const float *scalars, int64_t stride, const float *vectors,
                              int64_t steps, const int rows, __m256 acc[PRODUCT_ROWS][PRODUCT_VECS])
{
    for (int r = 0; r < rows; r++)
        acc[r][0] = acc[r][1] = _mm256_setzero_ps();
    product_more(scalars, stride, vectors, steps, rows, acc);
}

QKV_INLINE void product_8(const float *scalars, int64_t stride, const float *vectors,
                          const int rows, __m256 acc[PRODUCT_ROWS][PRODUCT_VECS])
{
    product_more(scalars, stride, vectors, PRODUCT_STEPS, rows, acc);
}

#endif

#endif
