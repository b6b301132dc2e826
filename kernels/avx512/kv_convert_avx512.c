/* SPDX-License-Identifier: MIT */
/*
 * Rows of a cache from and to f32, with the bits of the scalar kernels:
 * additions, multiplications and divisions are the same, one by one.
 *
 * Narrowing goes through 64 elements (8-bit floats, i8) or 4 blocks at a time: 4
 * vectors of 32-bit integers are packed to bytes by 3 instructions and put in order
 * by one, and what a block takes once, its maximum, two divisions and a conversion,
 * is made for 4 blocks in one vector of 4. Magnitudes are compared as integers, so
 * that a NaN or an infinity shows as one of 0x7f800000 and more; rows and blocks with
 * anything unusual in them go another way, with all the limits and conditions.
 */
#include "kv_avx512.h"

#define SMALLEST_NORMAL 0x1p-126f
#define F16_MAX 65504.0f
#define INFINITY_BITS 0x7f800000

/* ------------------------------------------------------------------- widen */

ALWAYS_INLINE void widen_row(const char *x, __m512 factor, float *y, int64_t n, const int type)
{
    for (int64_t i = 0; i < n; i += STEP) {
        __m512 wide[2];
        load_step(x, i, n - i, type, wide);
        if (!is_block(type) && type != KV_E5M2) {
            wide[0] = _mm512_mul_ps(wide[0], factor);
            wide[1] = _mm512_mul_ps(wide[1], factor);
        }
        if (n - i >= STEP) {
            _mm512_storeu_ps(y + i, wide[0]);
            _mm512_storeu_ps(y + i + LANES, wide[1]);
        } else {
            store_tail(y + i, lanes_below(n - i), wide[0]);
            if (n - i > LANES)
                store_tail(y + i + LANES, lanes_below(n - i - LANES), wide[1]);
        }
    }
}

void qkv_widen_q8_0_avx512(const void *x, const float *scale, float *y, int64_t n)
{
    (void)scale;
    widen_row(x, _mm512_setzero_ps(), y, n, KV_Q8_0);
}

void qkv_widen_q4_0_avx512(const void *x, const float *scale, float *y, int64_t n)
{
    (void)scale;
    widen_row(x, _mm512_setzero_ps(), y, n, KV_Q4_0);
}

void qkv_widen_i8_avx512(const void *x, const float *scale, float *y, int64_t n)
{
    widen_row(x, _mm512_set1_ps(*scale), y, n, KV_I8);
}

void qkv_widen_f8_e4m3_avx512(const void *x, const float *scale, float *y, int64_t n)
{
    (void)scale;
    widen_row(x, _mm512_set1_ps(kv_unit(KV_E4M3)), y, n, KV_E4M3);
}

void qkv_widen_f8_e5m2_avx512(const void *x, const float *scale, float *y, int64_t n)
{
    (void)scale;
    widen_row(x, _mm512_setzero_ps(), y, n, KV_E5M2);
}

/* ------------------------------------------------------------- shared words */

ALWAYS_INLINE __m512i magnitude_of(__m512 x)
{
    return _mm512_and_si512(_mm512_castps_si512(x), _mm512_set1_epi32(0x7fffffff));
}

/* The maximum of two vectors, as signed or as unsigned integers. */
ALWAYS_INLINE __m512i max_by(__m512i a, __m512i b, const bool is_signed)
{
    return is_signed ? _mm512_max_epi32(a, b) : _mm512_max_epu32(a, b);
}

/* The largest of each group of 4 lanes, in all of them. */
ALWAYS_INLINE __m512i max_of_quads(__m512i x, const bool is_signed)
{
    const __m512 a = _mm512_castsi512_ps(x);
    x = max_by(x, _mm512_castps_si512(_mm512_shuffle_ps(a, a, 0x4e)), is_signed);
    const __m512 b = _mm512_castsi512_ps(x);
    return max_by(x, _mm512_castps_si512(_mm512_shuffle_ps(b, b, 0xb1)), is_signed);
}

/* Vectors that were packed lane by lane, in their order: 4 elements of each in turn. */
ALWAYS_INLINE __m512i in_order(__m512i packed)
{
    const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    return _mm512_permutexvar_epi32(order, packed);
}

/* 4 vectors of integers from -128 to 127 as bytes, not in order. */
ALWAYS_INLINE __m512i pack_signed(const __m512i x[4])
{
    return _mm512_packs_epi16(_mm512_packs_epi32(x[0], x[1]), _mm512_packs_epi32(x[2], x[3]));
}

ALWAYS_INLINE void load_4(const float *x, __m512 v[4])
{
    UNROLL
    for (int i = 0; i < 4; i++)
        v[i] = _mm512_loadu_ps(x + i * LANES);
}

ALWAYS_INLINE float float_of_bits(int32_t bits)
{
    return _mm_cvtss_f32(_mm_castsi128_ps(_mm_cvtsi32_si128(bits)));
}

/* The scalar's inverse: 0 where |d| is below the normal range. */
ALWAYS_INLINE float inverse_of(float d)
{
    return d < SMALLEST_NORMAL && d > -SMALLEST_NORMAL ? 0.0f : 1.0f / d;
}

/* The same of 4; lanes that are not divided raise no exception. */
ALWAYS_INLINE __m128 inverses_of(__m128 d)
{
    const __m128 magnitude = _mm_andnot_ps(_mm_set1_ps(-0.0f), d);
    const __mmask8 normal = _mm_cmp_ps_mask(magnitude, _mm_set1_ps(SMALLEST_NORMAL), _CMP_GE_OQ);
    return _mm_maskz_div_ps(normal, _mm_set1_ps(1.0f), d);
}

/* Each of 4 in all lanes of a vector of its own. */
ALWAYS_INLINE void spread(__m128 x, __m512 each[4])
{
    const __m512 all = _mm512_broadcast_f32x4(x);
    each[0] = _mm512_shuffle_ps(all, all, 0x00);
    each[1] = _mm512_shuffle_ps(all, all, 0x55);
    each[2] = _mm512_shuffle_ps(all, all, 0xaa);
    each[3] = _mm512_shuffle_ps(all, all, 0xff);
}

ALWAYS_INLINE void store_half(char *p, uint64_t half)
{
    const uint16_t low = (uint16_t)half;
    memcpy(p, &low, sizeof low);
}

ALWAYS_INLINE uint64_t halves_of(__m128 x)
{
    return (uint64_t)_mm_cvtsi128_si64(_mm_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT));
}

/* ---------------------------------------------------------------- narrow f8 */

/* An 8-bit float, as narrow_f8() of the scalar kernels has it. */
typedef struct f8_format {
    int fraction_bits, min_exponent, largest;
} f8_format;

/*
 * The number of the 8-bit float nearest to each |x|, in the low 16 bits of a lane and
 * not yet limited to the largest; a NaN gives anything. Adding 1.5 * 2^23 steps to |x|
 * leaves no bit below a step, rounding to nearest even, and the low bits of the sum
 * are the steps. The numbers of the steps below this exponent, an even number, are added
 * with them: what is added has nothing else in its low 16 bits.
 */
ALWAYS_INLINE __m512i number_of(__m512 x, f8_format f)
{
    const int shift = 23 - f.fraction_bits, lowest = (127 + f.min_exponent) << 23;
    /* Beyond 2^16 everything is the largest number; below, the sum is finite. 10: the
     * smaller magnitude. */
    const __m512i small = _mm512_castps_si512(_mm512_range_ps(x, _mm512_set1_ps(0x1p16f), 10));
    const __m512i exponent = _mm512_max_epi32(
        _mm512_and_si512(small, _mm512_set1_epi32(INFINITY_BITS)), _mm512_set1_epi32(lowest));
    /* 1.5 * 2^shift * 2^exponent, less the steps below the smallest normal's */
    const int units = (shift << 23 | 0x400000) - (lowest >> shift);
    const __m512i round = _mm512_add_epi32(_mm512_add_epi32(exponent, _mm512_set1_epi32(units)),
                                           _mm512_srli_epi32(exponent, (unsigned)shift));
    return _mm512_castps_si512(
        _mm512_add_ps(_mm512_castsi512_ps(small), _mm512_castsi512_ps(round)));
}

/* 64 elements, none of which is a NaN. */
ALWAYS_INLINE __m512i narrow_64(const __m512 x[4], f8_format f)
{
    const __m512i largest = _mm512_set1_epi16((short)f.largest);
    __m512i number[4], sign[4];
    UNROLL
    for (int i = 0; i < 4; i++) {
        number[i] = _mm512_and_si512(number_of(x[i], f), _mm512_set1_epi32(0xffff));
        sign[i] = _mm512_castps_si512(x[i]);
    }
    const __m512i low = _mm512_min_epu16(_mm512_packus_epi32(number[0], number[1]), largest);
    const __m512i high = _mm512_min_epu16(_mm512_packus_epi32(number[2], number[3]), largest);
    const __m512i bytes = _mm512_packus_epi16(low, high);
    /* Saturation keeps signs: (bytes & 0x7f) | (signs & 0x80). */
    const __m512i both =
        _mm512_ternarylogic_epi32(_mm512_set1_epi8(0x7f), bytes, pack_signed(sign), 0xca);
    return in_order(both);
}

/* Up to 16, NaNs too. */
static void narrow_upto_16(const float *x, uint8_t *y, int64_t n, f8_format f)
{
    const __mmask16 mask = lanes_below(n);
    const __m512 wide = load_tail(x, mask);
    const __m512i low = _mm512_and_si512(number_of(wide, f), _mm512_set1_epi32(0xffff));
    const __m512i number =
        _mm512_mask_mov_epi32(_mm512_min_epi32(low, _mm512_set1_epi32(f.largest)),
                              nan_lanes(wide, wide), _mm512_set1_epi32(0x7f));
    const __m512i sign = _mm512_srli_epi32(_mm512_castps_si512(wide), 24);
    _mm_mask_storeu_epi8(y, mask,
                         _mm512_cvtepi32_epi8(_mm512_or_si512(
                             number, _mm512_and_si512(sign, _mm512_set1_epi32(0x80)))));
}

ALWAYS_INLINE void narrow_f8_row(const float *x, uint8_t *y, int64_t n, f8_format f)
{
    int64_t i = 0;
    while (i < n) {
        __m512 wide[4];
        int64_t end = i + 4 * LANES;
        if (end <= n) {
            load_4(x + i, wide);
            if (!(nan_lanes(wide[0], wide[1]) | nan_lanes(wide[2], wide[3]))) {
                _mm512_storeu_si512(y + i, narrow_64(wide, f));
                i = end;
                continue;
            }
        }
        for (end = min_i64(end, n); i < end; i += LANES)
            narrow_upto_16(x + i, y + i, end - i, f);
    }
}

void qkv_narrow_f8_e4m3_avx512(const float *x, void *y, float *scale, int64_t n)
{
    (void)scale;
    narrow_f8_row(x, y, n, (f8_format){3, -6, 0x7e});
}

void qkv_narrow_f8_e5m2_avx512(const float *x, void *y, float *scale, int64_t n)
{
    (void)scale;
    narrow_f8_row(x, y, n, (f8_format){2, -14, 0x7b});
}

/* ---------------------------------------------------------------- narrow i8 */

/* The bits of the largest magnitude of a row. */
ALWAYS_INLINE int32_t row_max(const float *x, int64_t n)
{
    __m512i max[4];
    UNROLL
    for (int u = 0; u < 4; u++)
        max[u] = _mm512_setzero_si512();
    int64_t i = 0;
    for (; i + 4 * LANES <= n; i += 4 * LANES) {
        UNROLL
        for (int u = 0; u < 4; u++)
            max[u] = _mm512_max_epi32(max[u], magnitude_of(_mm512_loadu_ps(x + i + u * LANES)));
    }
    for (; i < n; i += LANES)
        max[0] = _mm512_max_epi32(max[0], magnitude_of(load_tail(x + i, lanes_below(n - i))));
    __m512i all =
        _mm512_max_epi32(_mm512_max_epi32(max[0], max[1]), _mm512_max_epi32(max[2], max[3]));
    all = _mm512_max_epi32(all, _mm512_shuffle_i32x4(all, all, 0x4e));
    all = _mm512_max_epi32(all, _mm512_shuffle_i32x4(all, all, 0xb1));
    return _mm_cvtsi128_si32(_mm512_castsi512_si128(max_of_quads(all, true)));
}

/* No element needs a limit: |x| <= 127 d (1 + u), and d is far below where its inverse
 * would lose bits, so that |x / d| is below 127.5. */
ALWAYS_INLINE __m512i round_16(__m512 x, __m512 inverse)
{
    return _mm512_cvtps_epi32(_mm512_mul_ps(x, inverse));
}

void qkv_narrow_i8_avx512(const float *x, void *y, float *scale, int64_t n)
{
    int8_t *e = y;
    const int32_t bits = row_max(x, n);
    if (bits >= INFINITY_BITS) {
        *scale = float_of_bits(0x7fc00000);
        memset(e, 0, (size_t)n);
        return;
    }
    const float d = float_of_bits(bits) / 127.0f;
    *scale = d < SMALLEST_NORMAL ? 0.0f : d;
    const __m512 inverse = _mm512_set1_ps(inverse_of(d));
    int64_t i = 0;
    for (; i + 4 * LANES <= n; i += 4 * LANES) {
        __m512i rounded[4];
        UNROLL
        for (int u = 0; u < 4; u++)
            rounded[u] = round_16(_mm512_loadu_ps(x + i + u * LANES), inverse);
        _mm512_storeu_si512(e + i, in_order(pack_signed(rounded)));
    }
    for (; i < n; i += LANES) {
        const __mmask16 mask = lanes_below(n - i);
        _mm_mask_storeu_epi8(e + i, mask,
                             _mm512_cvtepi32_epi8(round_16(load_tail(x + i, mask), inverse)));
    }
}

/* -------------------------------------------------------------- narrow blocks */

enum { VECS = QKV_KV_BLOCK / LANES, GROUP = 4 /* blocks whose scales are one vector */ };

static const uint16_t half_nan = 0x7e00;

/* The maxima of 4 blocks of one vector each: group g of 4 lanes holds that of block g. */
ALWAYS_INLINE __m512i block_maxima(const __m512i m[GROUP], const bool is_signed)
{
    const __m512i m01 = max_by(_mm512_shuffle_i32x4(m[0], m[1], 0x44),
                               _mm512_shuffle_i32x4(m[0], m[1], 0xee), is_signed);
    const __m512i m23 = max_by(_mm512_shuffle_i32x4(m[2], m[3], 0x44),
                               _mm512_shuffle_i32x4(m[2], m[3], 0xee), is_signed);
    return max_of_quads(max_by(_mm512_shuffle_i32x4(m01, m23, 0x88),
                               _mm512_shuffle_i32x4(m01, m23, 0xdd), is_signed),
                        is_signed);
}

/* One lane of each group of 4. */
ALWAYS_INLINE __m128i one_of_quads(__m512i x)
{
    const __m512i firsts = _mm512_setr_epi32(0, 4, 8, 12, 0, 4, 8, 12, 0, 4, 8, 12, 0, 4, 8, 12);
    return _mm512_castsi512_si128(_mm512_permutexvar_epi32(firsts, x));
}

/* Is one of the magnitudes beyond 'most', or not a number? */
ALWAYS_INLINE bool any_beyond(__m128i bits, float most)
{
    const __m128i limit = _mm_castps_si128(_mm_set1_ps(most));
    return _mm_movemask_epi8(_mm_cmpgt_epi32(bits, limit)) != 0;
}

ALWAYS_INLINE void load_blocks(const float *x, __m512 *v, const int blocks)
{
    UNROLL
    for (int i = 0; i < blocks * VECS; i++)
        v[i] = _mm512_loadu_ps(x + i * LANES);
}

/* 2 or 4 blocks; false, with nothing done, if one of them is unusual. */
ALWAYS_INLINE bool narrow_q8_0(const float *x, char *to, const int blocks)
{
    __m512 v[GROUP * VECS];
    load_blocks(x, v, blocks);
    __m512i m[GROUP];
    UNROLL
    for (int b = 0; b < GROUP; b++)
        m[b] = _mm512_max_epi32(magnitude_of(v[b % blocks * VECS]),
                                magnitude_of(v[b % blocks * VECS + 1]));
    const __m128i max = one_of_quads(block_maxima(m, true));
    if (any_beyond(max, 127 * F16_MAX))
        return false;
    const __m128 d = _mm_div_ps(_mm_castsi128_ps(max), _mm_set1_ps(127.0f));
    __m512 inverse[GROUP];
    spread(inverses_of(d), inverse);
    const uint64_t halves = halves_of(d);
    UNROLL
    for (int b = 0; b < blocks; b += 2) {
        const __m512 first = inverse[b], second = inverse[b + 1];
        const __m512i rounded[4] = {round_16(v[b * VECS], first), round_16(v[b * VECS + 1], first),
                                    round_16(v[b * VECS + 2], second),
                                    round_16(v[b * VECS + 3], second)};
        const __m512i bytes = in_order(pack_signed(rounded));
        char *block = to + b * QKV_Q8_0_BYTES;
        store_half(block, halves >> 16 * b);
        _mm256_storeu_si256((__m256i *)(void *)(block + 2), _mm512_castsi512_si256(bytes));
        store_half(block + QKV_Q8_0_BYTES, halves >> 16 * (b + 1));
        _mm256_storeu_si256((__m256i *)(void *)(block + QKV_Q8_0_BYTES + 2),
                            _mm512_extracti64x4_epi64(bytes, 1));
    }
    return true;
}

/* [x * inverse] within limits, where inverse is that of a scale that was limited. */
ALWAYS_INLINE __m512 limited(__m512 x, __m512 inverse, float low, float high)
{
    return _mm512_max_ps(_mm512_min_ps(_mm512_mul_ps(x, inverse), _mm512_set1_ps(high)),
                         _mm512_set1_ps(low));
}

/* Any block. */
static __attribute__((noinline)) void narrow_any_q8_0(const float *x, char *block)
{
    const int32_t max = row_max(x, QKV_KV_BLOCK);
    if (max >= INFINITY_BITS) {
        memcpy(block, &half_nan, sizeof half_nan);
        memset(block + 2, 0, QKV_KV_BLOCK);
        return;
    }
    float d = float_of_bits(max) / 127.0f;
    if (d > F16_MAX)
        d = F16_MAX;
    store_half(block, halves_of(_mm_set1_ps(d)));
    const __m512 inverse = _mm512_set1_ps(inverse_of(d));
    for (int i = 0; i < QKV_KV_BLOCK; i += LANES)
        _mm_storeu_si128((__m128i *)(void *)(block + 2 + i),
                         _mm512_cvtepi32_epi8(_mm512_cvtps_epi32(
                             limited(_mm512_loadu_ps(x + i), inverse, -127.0f, 127.0f))));
}

void qkv_narrow_q8_0_avx512(const float *x, void *y, float *scale, int64_t n)
{
    (void)scale;
    char *to = y;
    for (int64_t left = n / QKV_KV_BLOCK; left > 0;) {
        for (; left >= GROUP && narrow_q8_0(x, to, GROUP); left -= GROUP) {
            x += GROUP * QKV_KV_BLOCK;
            to += GROUP * QKV_Q8_0_BYTES;
        }
        int64_t some = min_i64(left, GROUP); /* left over, or unusual */
        if (some >= 2 && some < GROUP && narrow_q8_0(x, to, 2))
            some = 2;
        else
            for (int64_t b = 0; b < some; b++)
                narrow_any_q8_0(x + b * QKV_KV_BLOCK, to + b * QKV_Q8_0_BYTES);
        x += some * QKV_KV_BLOCK;
        to += some * QKV_Q8_0_BYTES;
        left -= some;
    }
}

/* The first of a block's elements whose magnitude has the bits in 'max'. */
ALWAYS_INLINE float first_of(const float *x, const __m512 v[VECS], __m512i max)
{
    const uint32_t low = _mm512_cmpeq_epi32_mask(magnitude_of(v[0]), max);
    const uint32_t high = _mm512_cmpeq_epi32_mask(magnitude_of(v[1]), max);
    return x[__builtin_ctz(high << LANES | low)];
}

/* (x * inverse + 8.5) without its fraction: from 0 to 16. */
ALWAYS_INLINE __m512i level_16(__m512 x, __m512 inverse)
{
    return _mm512_cvttps_epi32(_mm512_add_ps(_mm512_mul_ps(x, inverse), _mm512_set1_ps(8.5f)));
}

/*
 * The levels of 2 blocks, from 0 to 15: in the lower half of each 64 bits are the
 * nibbles of 4 bytes, those of the same block's bytes in each second 64 bits. Packing
 * left 4 bytes of the low nibbles before 4 of the high ones.
 */
ALWAYS_INLINE __m512i nibbles_of(const __m512 v[2 * VECS], const __m512 inverse[2])
{
    const __m512i levels[4] = {level_16(v[0], inverse[0]), level_16(v[1], inverse[0]),
                               level_16(v[2], inverse[1]), level_16(v[3], inverse[1])};
    const __m512i bytes = _mm512_min_epu8(pack_signed(levels), _mm512_set1_epi8(15));
    return _mm512_or_si512(bytes, _mm512_srli_epi64(bytes, 28));
}

/* As integers with a sign the largest is a positive number if there is one, as
 * integers without it is a negative one. */
ALWAYS_INLINE void extremes_of(const __m512 *v, const int blocks, __m128i *above, __m128i *below)
{
    const __m128i sign_bit = _mm_set1_epi32(INT32_MIN), zero = _mm_setzero_si128();
    __m512i high[GROUP], low[GROUP];
    UNROLL
    for (int b = 0; b < GROUP; b++) {
        const __m512i x = _mm512_castps_si512(v[b % blocks * VECS]);
        const __m512i y = _mm512_castps_si512(v[b % blocks * VECS + 1]);
        high[b] = _mm512_max_epi32(x, y);
        low[b] = _mm512_max_epu32(x, y);
    }
    *above = _mm_max_epi32(one_of_quads(block_maxima(high, true)), zero);
    *below = _mm_max_epi32(_mm_xor_si128(one_of_quads(block_maxima(low, false)), sign_bit), zero);
}

/* Which comes first decides where both signs have the largest magnitude, 'found'. */
static __attribute__((noinline)) __m128 first_of_blocks(const float *x, __m128 found, int blocks)
{
    float first[GROUP];
    _mm_storeu_ps(first, found);
    for (int b = 0; b < blocks; b++, x += QKV_KV_BLOCK) {
        const __m512 v[VECS] = {_mm512_loadu_ps(x), _mm512_loadu_ps(x + LANES)};
        if (first[b] != 0.0f)
            first[b] = first_of(x, v, magnitude_of(_mm512_set1_ps(first[b])));
    }
    return _mm_loadu_ps(first);
}

ALWAYS_INLINE void store_q4_0(char *block, uint64_t half, __m128i nibbles)
{
    store_half(block, half);
    _mm_storeu_si128((__m128i *)(void *)(block + 2), nibbles);
}

/* 2 or 4 blocks; false, with nothing done, if one of them is unusual. */
ALWAYS_INLINE bool narrow_q4_0(const float *x, char *to, const int blocks)
{
    __m512 v[GROUP * VECS];
    load_blocks(x, v, blocks);
    const __m128i sign_bit = _mm_set1_epi32(INT32_MIN), zero = _mm_setzero_si128();
    __m128i above, below; /* the largest magnitudes of positive and of negative elements */
    extremes_of(v, blocks, &above, &below);
    const __m128i max = _mm_max_epi32(above, below);
    if (any_beyond(max, 8 * F16_MAX))
        return false;
    /* In a block of nothing but zeros 0 counts as found, whatever its sign. */
    const __m128i ties =
        _mm_andnot_si128(_mm_cmpeq_epi32(max, zero), _mm_cmpeq_epi32(above, below));
    __m128 found = _mm_castsi128_ps(
        _mm_blendv_epi8(above, _mm_or_si128(below, sign_bit), _mm_cmpgt_epi32(below, above)));
    if (_mm_movemask_epi8(ties))
        found = first_of_blocks(x, found, blocks);
    /* The bits of a division by -8. */
    const __m128 d = _mm_mul_ps(found, _mm_set1_ps(-0.125f));
    __m512 inverse[GROUP];
    spread(inverses_of(d), inverse);
    const uint64_t halves = halves_of(d);
    const __m512i low = nibbles_of(v, inverse);
    const __m512i high = blocks == GROUP ? nibbles_of(v + 2 * VECS, inverse + 2) : low;
    const __m512i order =
        _mm512_setr_epi32(0, 4, 8, 12, 2, 6, 10, 14, 16, 20, 24, 28, 18, 22, 26, 30);
    const __m512i bytes = _mm512_permutex2var_epi32(low, order, high);
    store_q4_0(to, halves, _mm512_castsi512_si128(bytes));
    store_q4_0(to + QKV_Q4_0_BYTES, halves >> 16, _mm512_extracti32x4_epi32(bytes, 1));
    if (blocks == GROUP) {
        store_q4_0(to + 2 * QKV_Q4_0_BYTES, halves >> 32, _mm512_extracti32x4_epi32(bytes, 2));
        store_q4_0(to + 3 * QKV_Q4_0_BYTES, halves >> 48, _mm512_extracti32x4_epi32(bytes, 3));
    }
    return true;
}

/* Any block. */
static __attribute__((noinline)) void narrow_any_q4_0(const float *x, char *block)
{
    const __m512 v[VECS] = {_mm512_loadu_ps(x), _mm512_loadu_ps(x + LANES)};
    const int32_t max = row_max(x, QKV_KV_BLOCK);
    if (max >= INFINITY_BITS) {
        store_q4_0(block, half_nan, _mm_set1_epi8((char)0x88));
        return;
    }
    float d = (max ? first_of(x, v, _mm512_set1_epi32(max)) : 0.0f) / -8.0f;
    d = d > F16_MAX ? F16_MAX : d < -F16_MAX ? -F16_MAX : d;
    const __m512 inverse = _mm512_set1_ps(inverse_of(d)), half = _mm512_set1_ps(8.5f);
    const __m512i low =
        _mm512_cvttps_epi32(_mm512_add_ps(limited(v[0], inverse, -8.0f, 7.0f), half));
    const __m512i high =
        _mm512_cvttps_epi32(_mm512_add_ps(limited(v[1], inverse, -8.0f, 7.0f), half));
    store_q4_0(block, halves_of(_mm_set1_ps(d)),
               _mm512_cvtepi32_epi8(_mm512_or_si512(low, _mm512_slli_epi32(high, 4))));
}

void qkv_narrow_q4_0_avx512(const float *x, void *y, float *scale, int64_t n)
{
    (void)scale;
    char *to = y;
    for (int64_t left = n / QKV_KV_BLOCK; left > 0;) {
        for (; left >= GROUP && narrow_q4_0(x, to, GROUP); left -= GROUP) {
            x += GROUP * QKV_KV_BLOCK;
            to += GROUP * QKV_Q4_0_BYTES;
        }
        int64_t some = min_i64(left, GROUP); /* left over, or unusual */
        if (some >= 2 && some < GROUP && narrow_q4_0(x, to, 2))
            some = 2;
        else
            for (int64_t b = 0; b < some; b++)
                narrow_any_q4_0(x + b * QKV_KV_BLOCK, to + b * QKV_Q4_0_BYTES);
        x += some * QKV_KV_BLOCK;
        to += some * QKV_Q4_0_BYTES;
        left -= some;
    }
}
