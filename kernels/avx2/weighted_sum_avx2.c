/* SPDX-License-Identifier: MIT */
/*
 * out[i] = out[i] * rescale[i] + sum over j of weights[i][j] * values[j],
 * values in any type.
 *
 * The lanes run along value_dim. Values are read once: chunks of them that
 * fit the first-level cache are taken by all rows, 4 rows x 3 vectors at a
 * time (2 x 4 or 1 x 8), in 12 accumulators that spend the time between two
 * chunks in memory. A key then costs 12 multiply-adds on 3 loads of values
 * and 4 broadcasts of weights: 6 cycles where two multiply-adds start a
 * cycle, for 19 instructions; 4 x 2 would take 14 for 8. While a chunk is
 * summed the next is prefetched.
 *
 * Each element of 'out' is the sum over the keys in their order, whatever the
 * place of its row and column. A weight of 0 times a NaN or infinity is a
 * NaN: rather than test every weight, the result is tested, and a vector that
 * came out as NaN is made again with the zeros skipped.
 */
#include "kv_avx2.h"

enum {
    PANEL = 256,        /* columns whose sums are under way at a time */
    CHUNK_BYTES = 16384 /* of values, in half of the first-level cache */
};

QKV_INLINE bool is_block(const int type)
{
    return type == KV_Q8_0 || type == KV_Q4_0;
}

/* Bytes of n elements, whole blocks. */
QKV_INLINE int64_t row_bytes(int64_t n, const int type)
{
    if (!is_block(type))
        return n * kv_size(type);
    return n / QKV_KV_BLOCK * (type == KV_Q8_0 ? QKV_Q8_0_BYTES : QKV_Q4_0_BYTES);
}

/*
 * The next chunk's values, asked for in the order in which they lie: memory
 * answers that much sooner than column by column. The rows need not exist:
 * addresses. A row is asked for in pieces of four places, each piece at most
 * four lines, and of a shorter one some line twice, for which nothing need be
 * decided on the way.
 */
typedef struct lines_ahead {
    const void *const *row, *const *end; /* rows still to be asked for */
    int64_t at, first, last;             /* bytes of a row: the next, and which are in question */
    int64_t place;                       /* bytes from a place to the next */
} lines_ahead;

QKV_INLINE lines_ahead begin_ahead(const void *const *row, const void *const *end, int64_t first,
                                   int64_t bytes)
{
    const int64_t pieces = (bytes + 255) / 256, places = 4 * (pieces + (pieces == 0));
    return (lines_ahead){.row = row,
                         .end = end,
                         .at = first,
                         .first = first,
                         .last = first + bytes,
                         .place = (bytes + places - 1) / places};
}

QKV_INLINE void prefetch_piece(lines_ahead *next)
{
    if (next->row >= next->end)
        return;
    prefetch_places((uintptr_t)*next->row + (uintptr_t)next->at, (uintptr_t)next->place);
    next->at += 4 * next->place;
    if (next->at >= next->last) {
        next->at = next->first;
        next->row++;
    }
}

/* Some rows, keys and columns, and where their sums are. */
typedef struct sum_part {
    const float *weights;
    const void *const *values; /* the keys' rows */
    float *sums;               /* [rows][PANEL] */
    int64_t weights_stride;
    int64_t begin; /* byte of the first column */
    int64_t keys;
    lines_ahead *next;
} sum_part;

#ifndef QKV_SIMDE

/*
 * Four rows times two or three vectors, in assembly for the reason in block_avx2.h.
 * Vectors of a value come to ymm12 to ymm14, a weight to ymm15. AT: a byte of the
 * value; 'i' is the key of a step, whose weights are at an offset, so that a step
 * moves each row of weights once.
 */
/* clang-format off */
#define AT(offset) #offset "(%[row],%[at]), "
#define EACH_2(what) what(12) what(13)
#define EACH_3(what) EACH_2(what) what(14)
#define SHIFT_16(r) "vpslld $16, %%ymm" #r ", %%ymm" #r "\n\t"
#define SHIFT_8(r) "vpsllw $8, %%xmm" #r ", %%xmm" #r "\n\t"
#define FROM_INT(r) "vcvtdq2ps %%ymm" #r ", %%ymm" #r "\n\t"
#define FROM_HALF(r) "vcvtph2ps %%xmm" #r ", %%ymm" #r "\n\t"
#define FETCH_2(load, b0, b1, to) load " " AT(b0) "%%" to "12\n\t" load " " AT(b1) "%%" to "13\n\t"
#define FETCH_3(load, b0, b1, b2, to) FETCH_2(load, b0, b1, to) load " " AT(b2) "%%" to "14\n\t"

#define LOAD_F32_2 FETCH_2("vmovups", 0, 32, "ymm")
#define LOAD_F32_3 FETCH_3("vmovups", 0, 32, 64, "ymm")
#define LOAD_F16_2 FETCH_2("vcvtph2ps", 0, 16, "ymm")
#define LOAD_F16_3 FETCH_3("vcvtph2ps", 0, 16, 32, "ymm")
#define LOAD_BF16_2 FETCH_2("vpmovzxwd", 0, 16, "ymm") EACH_2(SHIFT_16)
#define LOAD_BF16_3 FETCH_3("vpmovzxwd", 0, 16, 32, "ymm") EACH_3(SHIFT_16)
#define LOAD_I8_2 FETCH_2("vpmovsxbd", 0, 8, "ymm") EACH_2(FROM_INT)
#define LOAD_I8_3 FETCH_3("vpmovsxbd", 0, 8, 16, "ymm") EACH_3(FROM_INT)
#define LOAD_E5M2_2 FETCH_2("vpmovzxbw", 0, 8, "xmm") EACH_2(SHIFT_8) EACH_2(FROM_HALF)
#define LOAD_E5M2_3 FETCH_3("vpmovzxbw", 0, 8, 16, "xmm") EACH_3(SHIFT_8) EACH_3(FROM_HALF)

#define MULTIPLY_2(r)                                                                              \
    "vbroadcastss %[w" #r "], %%ymm15\n\t"                                                         \
    "vfmadd231ps %%ymm12, %%ymm15, %[a" #r "0]\n\t"                                               \
    "vfmadd231ps %%ymm13, %%ymm15, %[a" #r "1]\n\t"
#define MULTIPLY_3(r) MULTIPLY_2(r) "vfmadd231ps %%ymm14, %%ymm15, %[a" #r "2]\n\t"
#define MULTIPLY(n) MULTIPLY_##n(0) MULTIPLY_##n(1) MULTIPLY_##n(2) MULTIPLY_##n(3)
#define ACC_2(r) [a##r##0] "+x"(acc[r][0]), [a##r##1] "+x"(acc[r][1])
#define ACC_3(r) ACC_2(r), [a##r##2] "+x"(acc[r][2])
#define ADD_KEY(type, n)                                                                           \
    __asm__(LOAD_##type##_##n MULTIPLY(n)                                                          \
            : ACC_##n(0), ACC_##n(1), ACC_##n(2), ACC_##n(3)                                       \
            : [row] "r"(row), [at] "r"(at), [w0] "m"(w[0][i]), [w1] "m"(w[1][i]),                  \
              [w2] "m"(w[2][i]), [w3] "m"(w[3][i])                                                 \
            : "ymm12", "ymm13", "ymm14", "ymm15", "memory")
/* clang-format on */
#define ADD_KEY_4(type)                                                                            \
    do {                                                                                           \
        if (n_vecs == 3)                                                                           \
            ADD_KEY(type, 3);                                                                      \
        else                                                                                       \
            ADD_KEY(type, 2);                                                                      \
    } while (0)

QKV_INLINE void add_key_4(const char *row, int64_t at, const float *const *w, const int i,
                          const int n_vecs, const int type, __m256 acc[4][8])
{
    switch (type) {
    case KV_F16:
    case KV_HALF:
        ADD_KEY_4(F16);
        break;
    case KV_BF16:
        ADD_KEY_4(BF16);
        break;
    case KV_I8:
    case KV_Q8_0:
        ADD_KEY_4(I8);
        break;
    case KV_E5M2:
        ADD_KEY_4(E5M2);
        break;
    default:
        ADD_KEY_4(F32);
        break;
    }
}

#endif

/* n_vecs vectors from p on. Those of q4_0 are two, the lower and the upper halves of 8
 * bytes; the scales of blocks are in the weights. */
QKV_INLINE void load_vectors(const char *p, const int n_vecs, const int type, __m256 *value)
{
    if (type == KV_Q4_0) {
        const __m256i bytes = _mm256_cvtepu8_epi32(load_64(p)), eight = _mm256_set1_epi32(8);
        const __m256i low = _mm256_and_si256(bytes, _mm256_set1_epi32(15));
        value[0] = _mm256_cvtepi32_ps(_mm256_sub_epi32(low, eight));
        value[1] = _mm256_cvtepi32_ps(_mm256_sub_epi32(_mm256_srli_epi32(bytes, 4), eight));
        return;
    }
    QKV_UNROLL
    for (int v = 0; v < n_vecs; v++)
        value[v] = load_8(p + v * LANES * kv_size(type), type == KV_Q8_0 ? KV_I8 : type);
}

/* n_rows weights of key i times n_vecs vectors from byte 'at' of its value. */
QKV_INLINE void add_key(const char *row, int64_t at, const float *const *w, const int i,
                        const int n_rows, const int n_vecs, const int type, __m256 acc[4][8])
{
    __m256 value[8];
#ifndef QKV_SIMDE
    if (n_rows == 4 && type != KV_Q4_0 && (n_vecs == 2 || n_vecs == 3)) {
        add_key_4(row, at, w, i, n_vecs, type, acc);
        return;
    }
#endif
    load_vectors(row + at, n_vecs, type, value);
    QKV_UNROLL
    for (int r = 0; r < n_rows; r++) {
        const __m256 weight = _mm256_broadcast_ss(w[r] + i);
        QKV_UNROLL
        for (int v = 0; v < n_vecs; v++)
            acc[r][v] = _mm256_fmadd_ps(weight, value[v], acc[r][v]);
    }
}

/* At which byte of a value the vectors from column d on begin, d being below 16 in a
 * block of q4_0. */
QKV_INLINE int64_t begin_of(int64_t d, const int type)
{
    if (!is_block(type))
        return d * kv_size(type);
    return row_bytes(d, type) + (int64_t)sizeof(uint16_t) + d % QKV_KV_BLOCK;
}

/* n_rows rows, n_vecs vectors from column d on; those of q4_0 are half a block apart. */
QKV_INLINE void sum_vectors(const sum_part *p, int64_t d, const int n_rows, const int n_vecs,
                            const int type)
{
    const int64_t step = type == KV_Q4_0 ? QKV_KV_BLOCK / 2 : LANES;
    const int64_t begin = p->begin + begin_of(d, type);
    const void *const *row = p->values, *const *end = row + p->keys;
    float *sums = p->sums + d;
    lines_ahead next = *p->next;
    const float *w[4];
    __m256 acc[4][8];
    QKV_UNROLL
    for (int r = 0; r < n_rows; r++) {
        w[r] = p->weights + r * p->weights_stride;
        QKV_UNROLL
        for (int v = 0; v < n_vecs; v++)
            acc[r][v] = _mm256_load_ps(sums + r * PANEL + v * step);
    }
    for (; end - row >= 4; row += 4) {
        prefetch_piece(&next);
        QKV_UNROLL
        for (int i = 0; i < 4; i++)
            add_key(row[i], begin, w, i, n_rows, n_vecs, type, acc);
        QKV_UNROLL
        for (int r = 0; r < n_rows; r++)
            w[r] += 4;
    }
    for (; row < end; row++) {
        add_key(row[0], begin, w, 0, n_rows, n_vecs, type, acc);
        QKV_UNROLL
        for (int r = 0; r < n_rows; r++)
            w[r]++;
    }
    QKV_UNROLL
    for (int r = 0; r < n_rows; r++)
        QKV_UNROLL
    for (int v = 0; v < n_vecs; v++)
        _mm256_store_ps(sums + r * PANEL + v * step, acc[r][v]);
    *p->next = next;
}

/* The scales of the blocks of up to 8 keys, from byte 'begin' on. Inserted
 * one by one: gathered in memory, the load would wait for the stores. */
QKV_INLINE __m256 scales_of(const void *const *rows, int64_t begin, int64_t n)
{
    __m128i halves = _mm_setzero_si128();
    int16_t h[LANES] = {0};
    if (n == LANES) {
        QKV_UNROLL
        for (int k = 0; k < LANES; k++)
            memcpy(&h[k], (const char *)rows[k] + begin, sizeof h[k]);
        halves = _mm_setr_epi16(h[0], h[1], h[2], h[3], h[4], h[5], h[6], h[7]);
    } else {
        for (int64_t k = 0; k < n; k++)
            memcpy(&h[k], (const char *)rows[k] + begin, sizeof h[k]);
        halves = load_128(h);
    }
    return _mm256_cvtph_ps(halves);
}

/* scaled[r][j] = weights[r][j] * the scale of key j's block, 8 keys at a time. */
QKV_INLINE void block_weights(const sum_part *p, int64_t begin, const int n_rows, float *scaled)
{
    for (int64_t j = 0; j < p->keys; j += LANES) {
        const int64_t n = p->keys - j < LANES ? p->keys - j : LANES;
        const __m256 scales = scales_of(p->values + j, begin, n);
        QKV_UNROLL
        for (int r = 0; r < n_rows; r++) {
            const float *weights = p->weights + r * p->weights_stride + j;
            const __m256 w = n == LANES ? _mm256_loadu_ps(weights) : load_tail(weights, n);
            _mm256_store_ps(scaled + r * QKV_KEY_BLOCK + j, _mm256_mul_ps(w, scales));
        }
    }
}

QKV_INLINE void sum_blocks(const sum_part *p, int64_t columns, const int n_rows, const int type)
{
    _Alignas(32) float scaled[4 * QKV_KEY_BLOCK];
    sum_part q = *p;
    q.weights = scaled;
    q.weights_stride = QKV_KEY_BLOCK;
    for (int64_t d = 0; d < columns; d += QKV_KV_BLOCK) {
        block_weights(p, p->begin + row_bytes(d, type), n_rows, scaled);
        sum_vectors(&q, d, n_rows, 2, type);
        sum_vectors(&q, d + (type == KV_Q4_0 ? LANES : 2 * LANES), n_rows, 2, type);
    }
}

/* The part of a vector from column d on. */
static QKV_NOINLINE void sum_columns_left(const sum_part *p, int64_t d, int64_t columns, int rows,
                                          int type)
{
    for (int64_t j = 0; j < p->keys; j++) {
        const char *values = (const char *)p->values[j] + p->begin + d * kv_size(type);
        const __m256 value = load_part_8(values, columns - d, type);
        for (int r = 0; r < rows; r++) {
            float *sums = p->sums + r * PANEL + d;
            const __m256 w = _mm256_broadcast_ss(p->weights + r * p->weights_stride + j);
            _mm256_store_ps(sums, _mm256_fmadd_ps(w, value, _mm256_load_ps(sums)));
        }
    }
}

QKV_INLINE void sum_4_rows(const sum_part *p, int64_t columns, const int type)
{
    int64_t d = 0;
    if (is_block(type)) {
        sum_blocks(p, columns, 4, type);
        return;
    }
    /* One vector alone would wait for its sums: of four left two and two are taken. */
    for (; d + 3 * LANES <= columns && (d + 4 * LANES > columns || d + 5 * LANES <= columns);
         d += 3 * LANES)
        sum_vectors(p, d, 4, 3, type);
    for (; d + 2 * LANES <= columns; d += 2 * LANES)
        sum_vectors(p, d, 4, 2, type);
    if (d + LANES <= columns)
        sum_vectors(p, d, 4, 1, type);
}

QKV_INLINE void sum_2_rows(const sum_part *p, int64_t columns, const int type)
{
    int64_t d = 0;
    if (is_block(type)) {
        sum_blocks(p, columns, 2, type);
        return;
    }
    for (; d + 4 * LANES <= columns; d += 4 * LANES)
        sum_vectors(p, d, 2, 4, type);
    for (; d + LANES <= columns; d += LANES)
        sum_vectors(p, d, 2, 1, type);
}

QKV_INLINE void sum_1_row(const sum_part *p, int64_t columns, const int type)
{
    int64_t d = 0;
    if (is_block(type)) {
        sum_blocks(p, columns, 1, type);
        return;
    }
    for (; d + 8 * LANES <= columns; d += 8 * LANES)
        sum_vectors(p, d, 1, 8, type);
    for (; d + 2 * LANES <= columns; d += 2 * LANES)
        sum_vectors(p, d, 1, 2, type);
    for (; d + LANES <= columns; d += LANES)
        sum_vectors(p, d, 1, 1, type);
}

/* The functions of a type, whole vectors only. */
typedef void sum_step(const sum_part *p, int64_t columns);
typedef struct sum_steps {
    sum_step *four, *two, *one;
    int type;
} sum_steps;

/* weights[r][j] * the scale of key j, for i8. */
static void scale_weights(const qkv_weighted_sum_args *a, int64_t row, int rows, int64_t key,
                          int64_t keys, float *scaled)
{
    for (int r = 0; r < rows; r++) {
        const float *weights = a->weights + (row + r) * a->weights_stride + key;
        for (int64_t j = 0; j < keys; j++)
            scaled[r * QKV_KEY_BLOCK + j] =
                weights[j] * a->value_scales[(key + j) * a->value_scales_stride];
    }
}

/* One vector of one row, skipping zero weights. */
static QKV_NOINLINE __m256 careful_sum(const qkv_weighted_sum_args *a, int64_t row, int64_t d,
                                       int type)
{
    const float *weights = a->weights + row * a->weights_stride;
    const int64_t rest = a->value_dim - d;
    __m256 acc = _mm256_setzero_ps();
    for (int64_t j = 0; j < a->kv_len; j++) {
        const char *value_row =
            a->values_at ? a->values_at[j] : (const char *)a->values + j * a->values_stride;
        const char *p = value_row + d * kv_size(type);
        __m256 w = _mm256_set1_ps(weights[j]), value;
        if (weights[j] == 0.0f)
            continue;
        if (type == KV_I8)
            w = _mm256_mul_ps(w, _mm256_set1_ps(a->value_scales[j * a->value_scales_stride]));
        if (is_block(type)) {
            const char *block = kv_block(value_row, d, type);
            w = _mm256_mul_ps(w, block_scale(block));
            value = block_8(block, d % QKV_KV_BLOCK, type);
        } else {
            value = rest >= LANES ? load_8(p, type) : load_part_8(p, rest, type);
        }
        acc = _mm256_fmadd_ps(w, value, acc);
    }
    return acc;
}

/* The finished sums of one row, columns first .. first + columns - 1. */
static void store_sums(const qkv_weighted_sum_args *a, int64_t row, int64_t first, int64_t columns,
                       const float *sums, int type)
{
    float *out = a->out + row * a->out_stride + first;
    const __m256 unit = _mm256_set1_ps(kv_unit(type));
    for (int64_t d = 0; d < columns; d += LANES) {
        const int64_t rest = columns - d;
        __m256 sum = _mm256_load_ps(sums + d);
        if (a->skip_zero && any_nan(sum))
            sum = careful_sum(a, row, first + d, type);
        sum = _mm256_mul_ps(sum, unit); /* a power of two */
        if (a->rescale) {
            const __m256 old = rest >= LANES ? _mm256_loadu_ps(out + d) : load_tail(out + d, rest);
            sum = _mm256_fmadd_ps(old, _mm256_set1_ps(a->rescale[row]), sum);
        }
        if (rest >= LANES)
            _mm256_storeu_ps(out + d, sum);
        else
            store_tail(out + d, rest, sum);
    }
}

/* All keys, up to 4 rows, and the columns first .. first + columns - 1. 'listed'
 * are all rows in 'values', at least those of the keys. */
static void sum_panel(const qkv_weighted_sum_args *a, const void *const *values, int64_t listed,
                      int64_t row, int rows, int64_t first, int64_t columns, const sum_steps *s)
{
    _Alignas(32) float sums[4 * PANEL];
    _Alignas(32) uint16_t halves[CHUNK_BYTES / 2 + 16 * QKV_KEY_BLOCK];
    const void *halves_at[QKV_KEY_BLOCK + 7];
    float scaled[4 * QKV_KEY_BLOCK];
    const int64_t begin = row_bytes(first, s->type);
    const int type = s->type == KV_E4M3 ? KV_HALF : s->type;
    const int64_t fit = CHUNK_BYTES / row_bytes(columns, type) / LANES * LANES;
    const int64_t chunk = fit < LANES ? LANES : fit < QKV_KEY_BLOCK ? fit : QKV_KEY_BLOCK;
    for (int r = 0; r < rows; r++)
        for (int64_t d = 0; d < columns; d += LANES)
            _mm256_store_ps(sums + r * PANEL + d, _mm256_setzero_ps());
    for (int64_t key = 0; key < a->kv_len; key += chunk) {
        const int64_t after = key + chunk < listed ? key + chunk : listed;
        lines_ahead next =
            begin_ahead(values + after, values + (after + chunk < listed ? after + chunk : listed),
                        begin, row_bytes(columns, s->type));
        sum_part p = {.weights = a->weights + row * a->weights_stride + key,
                      .values = values + key,
                      .begin = begin,
                      .sums = sums,
                      .weights_stride = a->weights_stride,
                      .keys = a->kv_len - key < chunk ? a->kv_len - key : chunk,
                      .next = &next};
        if (s->type == KV_E4M3) {
            const int64_t stride = (columns + 15) / 16 * 16;
            halves_of_e4m3(p.values, p.keys, begin, columns, halves, stride);
            list_rows(halves, stride * (int64_t)sizeof *halves, p.keys, halves_at);
            p.values = halves_at;
            p.begin = 0;
        }
        if (s->type == KV_I8) {
            scale_weights(a, row, rows, key, p.keys, scaled);
            p.weights = scaled;
            p.weights_stride = QKV_KEY_BLOCK;
        }
        (rows == 4 ? s->four : rows == 2 ? s->two : s->one)(&p, columns);
        if (columns % LANES)
            sum_columns_left(&p, columns / LANES * LANES, columns, rows, type);
    }
    for (int r = 0; r < rows; r++)
        store_sums(a, row + r, first, columns, sums + r * PANEL, s->type);
}

static void weighted_sum(const qkv_weighted_sum_args *a, const sum_steps *s)
{
    const void *listed[2 * QKV_KEY_BLOCK + 7], *const *values = a->values_at;
    int64_t n = a->kv_len + a->ahead;
    if (!values) { /* what follows the block is likely to be needed next */
        n = a->kv_len + QKV_KEY_BLOCK;
        list_rows(a->values, a->values_stride, n, listed);
        values = listed;
    }
    for (int64_t d = 0; d < a->value_dim; d += PANEL) {
        const int64_t columns = a->value_dim - d < PANEL ? a->value_dim - d : PANEL;
        for (int64_t row = 0; row < a->rows;) {
            const int rows = a->rows - row >= 4 ? 4 : a->rows - row >= 2 ? 2 : 1;
            sum_panel(a, values, n, row, rows, d, columns, s);
            row += rows;
        }
    }
}

/* Each step by itself: inlined into one, GCC runs out of registers. */
#define SUM_STEPS(t, type_)                                                                        \
    static QKV_NOINLINE void sum_4_rows_##t(const sum_part *p, int64_t columns)                    \
    {                                                                                              \
        sum_4_rows(p, columns, type_);                                                             \
    }                                                                                              \
    static QKV_NOINLINE void sum_2_rows_##t(const sum_part *p, int64_t columns)                    \
    {                                                                                              \
        sum_2_rows(p, columns, type_);                                                             \
    }                                                                                              \
    static QKV_NOINLINE void sum_1_row_##t(const sum_part *p, int64_t columns)                     \
    {                                                                                              \
        sum_1_row(p, columns, type_);                                                              \
    }
#define WEIGHTED_SUM(name, t, type_)                                                               \
    void name(const qkv_weighted_sum_args *a)                                                      \
    {                                                                                              \
        static const sum_steps steps = {sum_4_rows_##t, sum_2_rows_##t, sum_1_row_##t, type_};     \
        weighted_sum(a, &steps);                                                                   \
    }
SUM_STEPS(f32, KV_F32)
SUM_STEPS(f16, KV_F16)
SUM_STEPS(bf16, KV_BF16)
SUM_STEPS(i8, KV_I8)
SUM_STEPS(e5m2, KV_E5M2)
SUM_STEPS(half, KV_HALF)
SUM_STEPS(q8_0, KV_Q8_0)
SUM_STEPS(q4_0, KV_Q4_0)
WEIGHTED_SUM(qkv_weighted_sum_f32_avx2, f32, KV_F32)
WEIGHTED_SUM(qkv_weighted_sum_f16_avx2, f16, KV_F16)
WEIGHTED_SUM(qkv_weighted_sum_bf16_avx2, bf16, KV_BF16)
WEIGHTED_SUM(qkv_weighted_sum_i8_avx2, i8, KV_I8)
WEIGHTED_SUM(qkv_weighted_sum_f8_e5m2_avx2, e5m2, KV_E5M2)
WEIGHTED_SUM(qkv_weighted_sum_f8_e4m3_avx2, half, KV_E4M3) /* summed as f16 */
WEIGHTED_SUM(qkv_weighted_sum_q8_0_avx2, q8_0, KV_Q8_0)
WEIGHTED_SUM(qkv_weighted_sum_q4_0_avx2, q4_0, KV_Q4_0)
