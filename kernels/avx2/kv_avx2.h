/* SPDX-License-Identifier: MIT */
/*
 * Elements of keys and values as vectors of f32, for the AVX2 kernels that
 * read them where they lie. 'type' is a constant after inlining, so that each
 * kernel is compiled for each type by itself.
 *
 * A vector of 8 takes, loads included: f32 1 instruction, f16 1 (VCVTPH2PS),
 * bf16 and i8 2 (widen, shift or convert), e5m2 2 (an e5m2 is the upper half
 * of an f16), e4m3 6.
 */
#ifndef QKV_KV_AVX2_H
#define QKV_KV_AVX2_H

#include <string.h>

#include "internal.h"
#include "isa_avx2.h"

#define QKV_NOINLINE __attribute__((noinline, unused))

/*
 * KV_HALF: e4m3 on their way, as f16 of 2^-8 times their value. The last two
 * are blocks; kv_size() and load_8() do not know them.
 */
enum kv_type { KV_F32, KV_F16, KV_BF16, KV_HALF, KV_I8, KV_E4M3, KV_E5M2, KV_Q8_0, KV_Q4_0 };

QKV_INLINE int64_t kv_size(const int type)
{
    return type == KV_F32 ? 4 : type <= KV_HALF ? 2 : 1;
}

/* Keeps the compiler from folding a load into each of its uses. */
#ifdef QKV_SIMDE
#define QKV_IN_REGISTER(x) (void)(x)
#else
#define QKV_IN_REGISTER(x) __asm__("" : "+x"(x))
#endif

/* What the values of load_8() have to be multiplied by: a power of two. */
QKV_INLINE float kv_unit(const int type)
{
    return type == KV_E4M3 || type == KV_HALF ? 256.0f : 1.0f;
}

QKV_INLINE __m128i load_128(const void *p)
{
    return _mm_loadu_si128((const __m128i *)p);
}

QKV_INLINE __m128i load_64(const void *p)
{
    return _mm_loadl_epi64((const __m128i *)p);
}

/*
 * An e4m3 has the fields of an f16, but for an exponent that lacks its highest
 * bit: moved there it is an f16 of 2^-8 times the value, subnormals included.
 * Only the NaN, all ones, has to be made one.
 */
QKV_INLINE __m256 widen_e4m3(__m128i bytes)
{
    const __m128i x = _mm_slli_epi16(_mm_cvtepi8_epi16(bytes), 7); /* s s eeee mmm 0000000 */
    const __m128i half = _mm_and_si128(x, _mm_set1_epi16((short)0xbfff));
    const __m128i magnitude = _mm_and_si128(x, _mm_set1_epi16(0x3fff));
    const __m128i nan = _mm_cmpgt_epi16(magnitude, _mm_set1_epi16(0x3f00));
    return _mm256_cvtph_ps(_mm_or_si128(half, nan));
}

/*
 * The same for 16 elements, only as far as f16: 6 instructions, where
 * widen_e4m3() takes 7 for 8. Worth a way through the first-level cache.
 */
QKV_INLINE __m256i halves_of_16(const void *bytes)
{
    const __m256i w = _mm256_slli_epi16(_mm256_cvtepi8_epi16(load_128(bytes)), 7);
    const __m256i half = _mm256_and_si256(w, _mm256_set1_epi16((short)0xbfff));
    const __m256i magnitude = _mm256_and_si256(w, _mm256_set1_epi16(0x3fff));
    const __m256i nan = _mm256_cmpgt_epi16(magnitude, _mm256_set1_epi16(0x3f00));
    return _mm256_or_si256(half, nan);
}

/* Asks for four lines, or for the same one more than once. */
QKV_INLINE void prefetch_places(uintptr_t first, uintptr_t place)
{
    _mm_prefetch((const char *)first, _MM_HINT_T0);
    _mm_prefetch((const char *)(first + place), _MM_HINT_T0);
    _mm_prefetch((const char *)(first + 2 * place), _MM_HINT_T0);
    _mm_prefetch((const char *)(first + 3 * place), _MM_HINT_T0);
}

/*
 * Asks for n keys that are needed some keys after 'key'. In one piece a cache
 * is read faster without, as the core sees what comes; not across pages, nor
 * where other heads' keys lie between.
 */
QKV_INLINE void prefetch_keys(const qkv_dot_args *a, int64_t key, int64_t n, int64_t bytes)
{
    enum { AHEAD = 16, PIECE = 256 };
    if (!a->scattered || !a->keys_at)
        return;
    const int64_t place = bytes < PIECE ? (bytes + 3) / 4 : PIECE / 4, last = bytes - PIECE;
    for (int64_t k = key + AHEAD; k < key + AHEAD + n && k < a->kv_len; k++) {
        const uintptr_t row = (uintptr_t)a->keys_at[k];
        prefetch_places(row, (uintptr_t)place);
        for (int64_t b = PIECE; b < bytes; b += PIECE)
            prefetch_places(row + (uintptr_t)(b < last ? b : last), PIECE / 4);
    }
}

/* The addresses of n rows 'stride' bytes apart, and of up to 7 more. */
QKV_INLINE void list_rows(const void *first, int64_t stride, int64_t n, const void **rows)
{
    const __m256i step = _mm256_set1_epi64x(8 * stride);
    __m256i a = _mm256_add_epi64(_mm256_set1_epi64x((int64_t)(uintptr_t)first),
                                 _mm256_setr_epi64x(0, stride, 2 * stride, 3 * stride));
    __m256i b = _mm256_add_epi64(a, _mm256_set1_epi64x(4 * stride));
    for (int64_t i = 0; i < n; i += 8) {
        _mm256_storeu_si256((__m256i *)(void *)(rows + i), a);
        _mm256_storeu_si256((__m256i *)(void *)(rows + i + 4), b);
        a = _mm256_add_epi64(a, step);
        b = _mm256_add_epi64(b, step);
    }
}

/* n e4m3 of each row, from byte 'begin' on, as f16 in rows of 'to_stride', a
 * multiple of 16 and at least n. */
static QKV_NOINLINE void halves_of_e4m3(const void *const *rows, int64_t n_rows, int64_t begin,
                                        int64_t n, uint16_t *y, int64_t to_stride)
{
    for (int64_t row = 0; row < n_rows; row++, y += to_stride) {
        const char *x = (const char *)rows[row] + begin;
        int64_t i = 0;
        for (; i + 32 <= n; i += 32) {
            _mm256_store_si256((__m256i *)(void *)(y + i), halves_of_16(x + i));
            _mm256_store_si256((__m256i *)(void *)(y + i + 16), halves_of_16(x + i + 16));
        }
        if (i + 16 <= n) {
            _mm256_store_si256((__m256i *)(void *)(y + i), halves_of_16(x + i));
            i += 16;
        }
        if (i < n) {
            char copy[16] = {0};
            for (int64_t k = 0; k < n - i; k++)
                copy[k] = x[i + k];
            _mm256_store_si256((__m256i *)(void *)(y + i), halves_of_16(copy));
        }
    }
}

/* 8 elements from p on, in units of kv_unit(). */
QKV_INLINE __m256 load_8(const char *p, const int type)
{
    switch (type) {
    case KV_F16:
    case KV_HALF:
        return _mm256_cvtph_ps(load_128(p));
    case KV_BF16:
        return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(load_128(p)), 16));
    case KV_I8:
        return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(load_64(p)));
    case KV_E4M3:
        return widen_e4m3(load_64(p));
    case KV_E5M2:
        return _mm256_cvtph_ps(_mm_unpacklo_epi8(_mm_setzero_si128(), load_64(p)));
    default:
        return _mm256_loadu_ps((const float *)(const void *)p);
    }
}

/*
 * The first n of 8 elements from p on, 0 < n < 8, the other lanes 0. AVX2 has
 * masked loads for 32 bits only; narrower elements go through a copy.
 */
static QKV_NOINLINE __m256 load_part_8(const char *p, int64_t n, int type)
{
    char copy[32] = {0}; /* as much as load_8() can read */
    if (type == KV_F32)
        return load_tail((const float *)(const void *)p, n);
    for (int64_t i = 0; i < n * kv_size(type); i++)
        copy[i] = p[i];
    return load_8(copy, type);
}

/* Where the block of element d begins. */
QKV_INLINE const char *kv_block(const char *row, int64_t d, const int type)
{
    return row + d / QKV_KV_BLOCK * (type == KV_Q8_0 ? QKV_Q8_0_BYTES : QKV_Q4_0_BYTES);
}

/* The scale of a block in all lanes. */
QKV_INLINE __m256 block_scale(const char *block)
{
    int16_t half;
    memcpy(&half, block, sizeof half);
    return _mm256_cvtph_ps(_mm_set1_epi16(half));
}

/* The integers of half a block of q4_0, 16 bytes. */
QKV_INLINE __m128i nibbles(const char *block, const int half)
{
    const __m128i x = load_128(block + 2);
    const __m128i e = _mm_and_si128(half ? _mm_srli_epi16(x, 4) : x, _mm_set1_epi8(15));
    return _mm_sub_epi8(e, _mm_set1_epi8(8));
}

/* 8 integers of a block as f32, from element 'd' of it on, a multiple of 8. */
QKV_INLINE __m256 block_8(const char *block, int64_t d, const int type)
{
    if (type == KV_Q8_0)
        return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(load_64(block + 2 + d)));
    const __m128i half = d < 16 ? nibbles(block, 0) : nibbles(block, 1);
    const __m128i part = d % 16 ? _mm_srli_si128(half, 8) : half;
    return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(part));
}

/* [a.low + a.high, b.low + b.high] */
QKV_INLINE __m256 add_halves(__m256 a, __m256 b)
{
    return _mm256_add_ps(_mm256_blend_ps(a, b, 0xf0), _mm256_permute2f128_ps(a, b, 0x21));
}

/* In each half: [a0 + a2, a1 + a3, b0 + b2, b1 + b3] */
QKV_INLINE __m256 add_quarters(__m256 a, __m256 b)
{
    return _mm256_add_ps(_mm256_blend_ps(a, b, 0xcc), _mm256_shuffle_ps(a, b, 0x4e));
}

/* The sums of x[0], x[2], x[4], x[6], then those of x[1], x[3], x[5], x[7]. */
QKV_INLINE __m256 hsum8(const __m256 x[8])
{
    const __m256 s = add_quarters(add_halves(x[0], x[1]), add_halves(x[2], x[3]));
    const __m256 t = add_quarters(add_halves(x[4], x[5]), add_halves(x[6], x[7]));
    return _mm256_add_ps(_mm256_shuffle_ps(s, t, 0x88), _mm256_shuffle_ps(s, t, 0xdd));
}

/*
 * The same tree but for its last addition: the pairs of 4 rows with one key,
 * [a b | c d].
 */
QKV_INLINE __m256 pairs_of_4(__m256 a, __m256 b, __m256 c, __m256 d)
{
    return add_quarters(add_halves(a, c), add_halves(b, d));
}

/* Those of n_keys keys, whose accumulators are acc[row * n_keys + key]. */
QKV_INLINE void store_pairs(float *pairs, const __m256 *acc, const int n_keys)
{
    QKV_UNROLL
    for (int k = 0; k < n_keys; k++)
        _mm256_store_ps(pairs + k * LANES, pairs_of_4(acc[k], acc[n_keys + k], acc[2 * n_keys + k],
                                                      acc[3 * n_keys + k]));
}

/* The pairs of the keys from n on that scores_of_pairs() takes along. */
QKV_INLINE void clear_pairs(float *pairs, int64_t n)
{
    for (; n % LANES; n++)
        _mm256_store_ps(pairs + n * LANES, _mm256_setzero_ps());
}

/* The scores of 4 rows with 8 keys from the pairs of each key. */
QKV_INLINE void scores_of_pairs(const float *pairs, __m256 scores[4])
{
    __m256 x[4]; /* of two keys: [a b a b | c d c d] */
    QKV_UNROLL
    for (int i = 0; i < 4; i++) {
        const __m256 even = _mm256_load_ps(pairs + 2 * i * LANES);
        const __m256 odd = _mm256_load_ps(pairs + (2 * i + 1) * LANES);
        x[i] =
            _mm256_add_ps(_mm256_shuffle_ps(even, odd, 0x88), _mm256_shuffle_ps(even, odd, 0xdd));
    }
    const __m256 ac0 = _mm256_shuffle_ps(x[0], x[1], 0x88),
                 ac1 = _mm256_shuffle_ps(x[2], x[3], 0x88);
    const __m256 bd0 = _mm256_shuffle_ps(x[0], x[1], 0xdd),
                 bd1 = _mm256_shuffle_ps(x[2], x[3], 0xdd);
    scores[0] = _mm256_permute2f128_ps(ac0, ac1, 0x20);
    scores[1] = _mm256_permute2f128_ps(bd0, bd1, 0x20);
    scores[2] = _mm256_permute2f128_ps(ac0, ac1, 0x31);
    scores[3] = _mm256_permute2f128_ps(bd0, bd1, 0x31);
}

/* The sum of one alone, by the same tree. */
QKV_INLINE float hsum1(__m256 x)
{
    const __m128 x4 = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
    const __m128 x2 = _mm_add_ps(x4, _mm_movehl_ps(x4, x4));
    return _mm_cvtss_f32(_mm_add_ss(x2, _mm_movehdup_ps(x2)));
}

/* Stores, or adds, the first n of 8 scores of one row. */
QKV_INLINE void store_scores(const qkv_dot_args *a, int64_t row, int64_t key, int64_t n,
                             __m256 sums)
{
    float *scores = a->scores + row * a->scores_stride + key;
    if (n < LANES) {
        store_tail(scores, n, a->accumulate ? _mm256_add_ps(load_tail(scores, n), sums) : sums);
        return;
    }
    _mm256_storeu_ps(scores, a->accumulate ? _mm256_add_ps(_mm256_loadu_ps(scores), sums) : sums);
}

/* Stores, or adds, 4 scores of each of two rows. */
QKV_INLINE void store_scores_2(const qkv_dot_args *a, int64_t row, int64_t key, __m256 sums)
{
    float *scores = a->scores + row * a->scores_stride + key;
    const __m128 part[2] = {_mm256_castps256_ps128(sums), _mm256_extractf128_ps(sums, 1)};
    QKV_UNROLL
    for (int i = 0; i < 2; i++, scores += a->scores_stride)
        _mm_storeu_ps(scores, a->accumulate ? _mm_add_ps(_mm_loadu_ps(scores), part[i]) : part[i]);
}

#endif
