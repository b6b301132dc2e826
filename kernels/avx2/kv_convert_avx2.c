/* SPDX-License-Identifier: MIT */
/*
 * Rows of a cache from and to f32, with the bits of the scalar kernels:
 * additions, multiplications and divisions are the same, one by one.
 *
 * Integers: VCVTPS2DQ rounds to nearest even; VPACKSSDW and VPACKSSWB narrow
 * 4 vectors to one of 32 bytes, whose dwords one permutation puts in order.
 * The largest magnitude is found among the bits as integers, so that a NaN
 * or an infinity shows as one of 0x7f800000 and more.
 */
#include "kv_avx2.h"

#define SMALLEST_NORMAL 0x1p-126f
#define F16_MAX 65504.0f
#define INFINITY_BITS 0x7f800000

/* ------------------------------------------------------------------- widen */

QKV_INLINE void widen_elements(const char *x, __m256 factor, float *y, int64_t n, const int type)
{
    int64_t i = 0;
    for (; i + LANES <= n; i += LANES)
        _mm256_storeu_ps(y + i, _mm256_mul_ps(load_8(x + i, type), factor));
    if (i < n)
        store_tail(y + i, n - i, _mm256_mul_ps(load_part_8(x + i, n - i, type), factor));
}

QKV_INLINE void widen_blocks(const char *block, float *y, int64_t n, const int type)
{
    for (int64_t i = 0; i < n; i += QKV_KV_BLOCK, block = kv_block(block, QKV_KV_BLOCK, type)) {
        const __m256 scale = block_scale(block);
        QKV_UNROLL
        for (int d = 0; d < QKV_KV_BLOCK; d += LANES)
            _mm256_storeu_ps(y + i + d, _mm256_mul_ps(block_8(block, d, type), scale));
    }
}

void qkv_widen_q8_0_avx2(const void *x, const float *scale, float *y, int64_t n)
{
    (void)scale;
    widen_blocks(x, y, n, KV_Q8_0);
}

void qkv_widen_q4_0_avx2(const void *x, const float *scale, float *y, int64_t n)
{
    (void)scale;
    widen_blocks(x, y, n, KV_Q4_0);
}

void qkv_widen_i8_avx2(const void *x, const float *scale, float *y, int64_t n)
{
    widen_elements(x, _mm256_set1_ps(*scale), y, n, KV_I8);
}

void qkv_widen_f8_e4m3_avx2(const void *x, const float *scale, float *y, int64_t n)
{
    (void)scale;
    widen_elements(x, _mm256_set1_ps(kv_unit(KV_E4M3)), y, n, KV_E4M3);
}

void qkv_widen_f8_e5m2_avx2(const void *x, const float *scale, float *y, int64_t n)
{
    (void)scale;
    widen_elements(x, _mm256_set1_ps(kv_unit(KV_E5M2)), y, n, KV_E5M2);
}

/* ---------------------------------------------------------------- narrow f8 */

/* An 8-bit float, as narrow_f8() of the scalar kernels has it. */
typedef struct f8_format {
    int fraction_bits, min_exponent, largest;
} f8_format;

/*
 * Each lane's number of steps, from the step of its exponent: adding 1.5 *
 * 2^23 steps to |x| leaves no bit below a step, rounding to nearest even, and
 * the low bits of the sum are the steps.
 */
QKV_INLINE __m256i narrow_f8(__m256 x, f8_format f)
{
    const __m256i bits = _mm256_castps_si256(x);
    const __m256i magnitude = _mm256_and_si256(bits, _mm256_set1_epi32(0x7fffffff));
    const __m256i sign = _mm256_and_si256(_mm256_srli_epi32(bits, 24), _mm256_set1_epi32(0x80));
    const __m256i nan = _mm256_cmpgt_epi32(magnitude, _mm256_set1_epi32(INFINITY_BITS));
    /* Beyond 2^16 everything is the largest number; below, the sum is finite. */
    const __m256i small = _mm256_min_epi32(magnitude, _mm256_set1_epi32((127 + 16) << 23));
    const __m256i exponent =
        _mm256_max_epi32(_mm256_srli_epi32(small, 23), _mm256_set1_epi32(127 + f.min_exponent));
    /* 1.5 * 2^(23 - fraction_bits) * 2^exponent */
    const __m256i round =
        _mm256_add_epi32(_mm256_slli_epi32(exponent, 23),
                         _mm256_set1_epi32(((23 - f.fraction_bits) << 23) | 0x400000));
    const __m256i sum =
        _mm256_castps_si256(_mm256_add_ps(_mm256_castsi256_ps(small), _mm256_castsi256_ps(round)));
    const __m256i steps = _mm256_sub_epi32(sum, round);
    const __m256i above = _mm256_sub_epi32(exponent, _mm256_set1_epi32(127 + f.min_exponent));
    __m256i e = _mm256_add_epi32(_mm256_slli_epi32(above, f.fraction_bits), steps);
    e = _mm256_min_epi32(e, _mm256_set1_epi32(f.largest));
    e = _mm256_blendv_epi8(e, _mm256_set1_epi32(0x7f), nan);
    return _mm256_or_si256(e, sign);
}

/* The low bytes of the 32-bit lanes of four vectors, 0..255 each. */
QKV_INLINE __m256i pack_bytes(__m256i a, __m256i b, __m256i c, __m256i d)
{
    const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
    const __m256i bytes = _mm256_packus_epi16(_mm256_packus_epi32(a, b), _mm256_packus_epi32(c, d));
    return _mm256_permutevar8x32_epi32(bytes, order);
}

QKV_INLINE void narrow_f8_row(const float *x, uint8_t *y, int64_t n, f8_format f)
{
    int64_t i = 0;
    for (; i + 32 <= n; i += 32)
        _mm256_storeu_si256((__m256i *)(void *)(y + i),
                            pack_bytes(narrow_f8(_mm256_loadu_ps(x + i), f),
                                       narrow_f8(_mm256_loadu_ps(x + i + 8), f),
                                       narrow_f8(_mm256_loadu_ps(x + i + 16), f),
                                       narrow_f8(_mm256_loadu_ps(x + i + 24), f)));
    for (; i < n; i += LANES) {
        const int64_t part = n - i < LANES ? n - i : LANES;
        uint32_t lanes[LANES];
        _mm256_storeu_si256((__m256i *)(void *)lanes, narrow_f8(load_tail(x + i, part), f));
        for (int64_t k = 0; k < part; k++)
            y[i + k] = (uint8_t)lanes[k];
    }
}

void qkv_narrow_f8_e4m3_avx2(const float *x, void *y, float *scale, int64_t n)
{
    (void)scale;
    narrow_f8_row(x, y, n, (f8_format){3, -6, 0x7e});
}

void qkv_narrow_f8_e5m2_avx2(const float *x, void *y, float *scale, int64_t n)
{
    (void)scale;
    narrow_f8_row(x, y, n, (f8_format){2, -14, 0x7b});
}

/* ---------------------------------------------------------- narrow integers */

QKV_INLINE __m256i magnitude_of(__m256 x)
{
    return _mm256_and_si256(_mm256_castps_si256(x), _mm256_set1_epi32(0x7fffffff));
}

QKV_INLINE int32_t hmax_epi32(__m256i x)
{
    __m128i m = _mm_max_epi32(_mm256_castsi256_si128(x), _mm256_extracti128_si256(x, 1));
    m = _mm_max_epi32(m, _mm_shuffle_epi32(m, 0x4e));
    m = _mm_max_epi32(m, _mm_shuffle_epi32(m, 0xb1));
    return _mm_cvtsi128_si32(m);
}

/* The bits of the largest magnitude of a block. */
QKV_INLINE int32_t block_max(const __m256 x[4])
{
    return hmax_epi32(_mm256_max_epi32(_mm256_max_epi32(magnitude_of(x[0]), magnitude_of(x[1])),
                                       _mm256_max_epi32(magnitude_of(x[2]), magnitude_of(x[3]))));
}

QKV_INLINE float float_of_bits(int32_t bits)
{
    return _mm_cvtss_f32(_mm_castsi128_ps(_mm_cvtsi32_si128(bits)));
}

/* 1 / d, or 0 where |d| is below the normal range. */
QKV_INLINE float inverse_of(float d)
{
    return d < SMALLEST_NORMAL && d > -SMALLEST_NORMAL ? 0.0f : 1.0f / d;
}

QKV_INLINE void store_half(char *p, float d)
{
    const uint16_t half =
        (uint16_t)_mm_extract_epi16(_mm_cvtps_ph(_mm_set_ss(d), _MM_FROUND_TO_NEAREST_INT), 0);
    memcpy(p, &half, sizeof half);
}

static const uint16_t half_nan = 0x7e00;

/* [x * inverse], from -127 to 127; inverse 0 gives 0 for any finite x. */
QKV_INLINE __m256i round_8(__m256 x, __m256 inverse)
{
    const __m256 e = _mm256_mul_ps(x, inverse);
    const __m256 limited =
        _mm256_max_ps(_mm256_min_ps(e, _mm256_set1_ps(127.0f)), _mm256_set1_ps(-127.0f));
    return _mm256_cvtps_epi32(limited);
}

QKV_INLINE __m256i round_block(const __m256 x[4], float inverse)
{
    const __m256 factor = _mm256_set1_ps(inverse);
    const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
    const __m256i low = _mm256_packs_epi32(round_8(x[0], factor), round_8(x[1], factor));
    const __m256i high = _mm256_packs_epi32(round_8(x[2], factor), round_8(x[3], factor));
    return _mm256_permutevar8x32_epi32(_mm256_packs_epi16(low, high), order);
}

QKV_INLINE void load_block(const float *x, __m256 block[4])
{
    QKV_UNROLL
    for (int i = 0; i < 4; i++)
        block[i] = _mm256_loadu_ps(x + i * LANES);
}

void qkv_narrow_q8_0_avx2(const float *x, void *y, float *scale, int64_t n)
{
    (void)scale;
    char *block = y;
    for (int64_t i = 0; i < n; i += QKV_KV_BLOCK, block += QKV_Q8_0_BYTES) {
        __m256 values[4];
        load_block(x + i, values);
        const int32_t max = block_max(values);
        if (max >= INFINITY_BITS) {
            memcpy(block, &half_nan, sizeof half_nan);
            memset(block + 2, 0, QKV_KV_BLOCK);
            continue;
        }
        float d = float_of_bits(max) / 127.0f;
        if (d > F16_MAX)
            d = F16_MAX;
        store_half(block, d);
        _mm256_storeu_si256((__m256i *)(void *)(block + 2), round_block(values, inverse_of(d)));
    }
}

static float row_max(const float *x, int64_t n, int32_t *bits)
{
    __m256i max = _mm256_setzero_si256();
    int64_t i = 0;
    for (; i + LANES <= n; i += LANES)
        max = _mm256_max_epi32(max, magnitude_of(_mm256_loadu_ps(x + i)));
    if (i < n)
        max = _mm256_max_epi32(max, magnitude_of(load_tail(x + i, n - i)));
    *bits = hmax_epi32(max);
    return float_of_bits(*bits);
}

void qkv_narrow_i8_avx2(const float *x, void *y, float *scale, int64_t n)
{
    int8_t *e = y;
    int32_t bits;
    const float d = row_max(x, n, &bits) / 127.0f;
    if (bits >= INFINITY_BITS) {
        *scale = float_of_bits(0x7fc00000);
        memset(e, 0, (size_t)n);
        return;
    }
    *scale = d < SMALLEST_NORMAL ? 0.0f : d;
    const float inverse = inverse_of(d);
    int64_t i = 0;
    for (; i + QKV_KV_BLOCK <= n; i += QKV_KV_BLOCK) {
        __m256 values[4];
        load_block(x + i, values);
        _mm256_storeu_si256((__m256i *)(void *)(e + i), round_block(values, inverse));
    }
    for (; i < n; i += LANES) {
        const int64_t part = n - i < LANES ? n - i : LANES;
        int32_t lanes[LANES];
        const __m256i rounded = round_8(load_tail(x + i, part), _mm256_set1_ps(inverse));
        _mm256_storeu_si256((__m256i *)(void *)lanes, rounded);
        for (int64_t k = 0; k < part; k++)
            e[i + k] = (int8_t)lanes[k];
    }
}

/* The first of the elements whose magnitude has these bits. */
QKV_INLINE float first_of(const float *x, const __m256 values[4], int32_t max)
{
    const __m256i wanted = _mm256_set1_epi32(max);
    uint32_t found = 0;
    QKV_UNROLL
    for (int i = 0; i < 4; i++) {
        const __m256i equal = _mm256_cmpeq_epi32(magnitude_of(values[i]), wanted);
        found |= (uint32_t)_mm256_movemask_ps(_mm256_castsi256_ps(equal)) << (i * LANES);
    }
    return x[__builtin_ctz(found)];
}

/* (x * inverse + 8.5) without its fraction, from 0 to 15. */
QKV_INLINE __m256i round_4(__m256 x, __m256 inverse)
{
    const __m256 e = _mm256_mul_ps(x, inverse);
    const __m256 limited =
        _mm256_max_ps(_mm256_min_ps(e, _mm256_set1_ps(7.0f)), _mm256_set1_ps(-8.0f));
    return _mm256_cvttps_epi32(_mm256_add_ps(limited, _mm256_set1_ps(8.5f)));
}

void qkv_narrow_q4_0_avx2(const float *x, void *y, float *scale, int64_t n)
{
    (void)scale;
    char *block = y;
    for (int64_t i = 0; i < n; i += QKV_KV_BLOCK, block += QKV_Q4_0_BYTES) {
        __m256 values[4];
        load_block(x + i, values);
        const int32_t max = block_max(values);
        if (max >= INFINITY_BITS) {
            memcpy(block, &half_nan, sizeof half_nan);
            memset(block + 2, 0x88, QKV_KV_BLOCK / 2);
            continue;
        }
        /* In a block of nothing but zeros 0 counts as found, whatever its sign. */
        float d = (max ? first_of(x + i, values, max) : 0.0f) / -8.0f;
        d = d > F16_MAX ? F16_MAX : d < -F16_MAX ? -F16_MAX : d;
        store_half(block, d);
        const __m256 inverse = _mm256_set1_ps(inverse_of(d));
        const __m256i bytes = pack_bytes(round_4(values[0], inverse), round_4(values[1], inverse),
                                         round_4(values[2], inverse), round_4(values[3], inverse));
        const __m128i high = _mm_slli_epi16(_mm256_extracti128_si256(bytes, 1), 4);
        _mm_storeu_si128((__m128i *)(void *)(block + 2),
                         _mm_or_si128(_mm256_castsi256_si128(bytes), high));
    }
}
