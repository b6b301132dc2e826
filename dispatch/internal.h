/* SPDX-License-Identifier: MIT */
/*
 * What kernels, drivers and the public functions share: the signature of
 * every kernel, the table of one ISA's kernels, and the prototypes, all
 * expanded from kernels.def and isas.def. No inline functions: files that
 * are compiled for different ISAs include this.
 *
 * Kernels trust their arguments: validation is the public functions' work.
 * They know no heads, batches, threads or masks beyond a visible range, and
 * they neither read nor write outside the elements described here.
 */
#ifndef QKV_INTERNAL_H
#define QKV_INTERNAL_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include <qkv/qkv.h>

enum {
    QKV_DOT_BLOCK = 4096, /* longest dot product that is summed in one piece */
    QKV_ROWS_MAX = 8,     /* most query rows of one row-driver step */
    QKV_SHORT_KEYS = 32   /* most keys that are attended to all at once */
};

/* Asks for the line at p, which the drivers need soon, or later: not in the first-level
 * cache, then. */
#if defined(__GNUC__)
#define QKV_PREFETCH(p) __builtin_prefetch(p)
#define QKV_PREFETCH_LATER(p) __builtin_prefetch(p, 0, 2)
#else
#define QKV_PREFETCH(p) ((void)(p))
#define QKV_PREFETCH_LATER(p) ((void)(p))
#endif

/* y[i] = exp(x[i]), in place or not. For x > 0 nothing is promised. */
typedef void qkv_exp_f32_fn(const float *x, float *y, int64_t n);

/* y[i] = 2^x[i], in place or not. For x > 0 nothing is promised. */
typedef void qkv_exp2_f32_fn(const float *x, float *y, int64_t n);

/*
 * scores[i][j] = queries[i] . keys[j], or += with 'accumulate'; head_dim at
 * most QKV_DOT_BLOCK. The bits of a score do not depend on its place among
 * the rows and keys. Key j lies at keys_at[j], or where that is NULL at byte
 * j * keys_stride of 'keys'; dot_<type> says of what type it is (those of
 * caches are told below). Only i8 has key_scales: that of key j is
 * key_scales[j * key_scales_stride].
 *
 * For q8_0, q4_0 and i8 a kernel may round a row of queries to multiples of
 * max|q| / 32767 first, to nearest: this changes a score by at most max|q| /
 * 65534 * sum |k|, and nothing else does by more than a product's bound. (The
 * scalar kernels do not; widen_<t> and dot_f32 give the same without it.)
 */
typedef struct qkv_dot_args {
    const float *queries;
    const void *keys;
    const void *const *keys_at; /* [kv_len] or NULL */
    const float *key_scales;    /* of i8, NULL for all others */
    float *scores;
    int64_t queries_stride;
    int64_t keys_stride; /* in bytes */
    int64_t key_scales_stride, scores_stride;
    int64_t rows, kv_len, head_dim;
    bool accumulate;
    bool scattered; /* a hint, with keys_at: they do not touch, and are worth asking for ahead */
} qkv_dot_args;
typedef void qkv_dot_fn(const qkv_dot_args *args);
typedef qkv_dot_fn qkv_dot_f32_fn, qkv_dot_f16_fn, qkv_dot_bf16_fn, qkv_dot_q8_0_fn, qkv_dot_i8_fn,
    qkv_dot_f8_e4m3_fn, qkv_dot_f8_e5m2_fn, qkv_dot_q4_0_fn;

/* A softmax row under way: the maximum so far and the sum of exponentials. */
typedef struct qkv_row_state {
    float max, sum;
} qkv_row_state;

/*
 * One whole row: weights = softmax(scale * scores), in place or not, with
 * the natural exponential. Returns its maximum and sum: (-inf, 0) for a row
 * without a visible key. n >= 1.
 */
typedef qkv_row_state qkv_scale_softmax_f32_fn(const float *scores, float *weights, int64_t n,
                                               float scale);

/*
 * One block of an online softmax. With t = scale_log2 * scores[j]:
 *
 *     max' = max(state->max, max t)
 *     scores[j] = 2^(t - max')                        (in place)
 *     state->sum = state->sum * r + sum of scores     with r = 2^(max - max')
 *
 * Returns r, the factor for whatever was summed under the old maximum. The
 * state begins as {-FLT_MAX, 0}: the lowest finite number, so that a row of
 * -inf stays -inf - -FLT_MAX = -inf and not NaN, while any finite logit
 * still replaces it. n >= 1.
 */
typedef float qkv_softmax_step_f32_fn(float *scores, int64_t n, float scale_log2,
                                      qkv_row_state *state);

/*
 * One block of a weighted sum, for rows <= QKV_ROWS_MAX:
 *
 *     out[i] = (rescale ? out[i] * rescale[i] : 0) + sum over j of weights[i][j] * values[j]
 *
 * where the sum over the block is made on its own and added last. With
 * 'skip_zero' a weight of 0 contributes nothing whatever its value is.
 * kv_len is from 0 to QKV_KEY_BLOCK. 'ahead', at most QKV_KEY_BLOCK, is a hint
 * what to prefetch: those values are not read.
 */
typedef struct qkv_weighted_sum_args {
    const float *weights;
    const void *values;
    const void *const *values_at; /* [kv_len + ahead] or NULL, as the keys' above */
    const float *value_scales;
    float *out;
    const float *rescale; /* [rows] or NULL */
    int64_t weights_stride;
    int64_t values_stride; /* in bytes */
    int64_t value_scales_stride, out_stride;
    int64_t rows, kv_len, value_dim;
    int64_t ahead; /* values after those of the block that are needed soon */
    bool skip_zero;
} qkv_weighted_sum_args;
typedef void qkv_weighted_sum_fn(const qkv_weighted_sum_args *args);
typedef qkv_weighted_sum_fn qkv_weighted_sum_f32_fn, qkv_weighted_sum_f16_fn,
    qkv_weighted_sum_bf16_fn, qkv_weighted_sum_q8_0_fn, qkv_weighted_sum_i8_fn,
    qkv_weighted_sum_f8_e4m3_fn, qkv_weighted_sum_f8_e5m2_fn, qkv_weighted_sum_q4_0_fn;

/*
 * The attention tile keeps query rows along the vector lanes: everything in
 * it is [something][tile_rows]. A row's lane never meets another's, so its
 * bits do not depend on where in a tile it lies.
 *
 * tile_load transposes query rows into a tile: tile[d][i] = rows[i][d] for
 * n_rows <= tile_rows rows of head_dim elements. Lanes of rows that do not
 * exist become 0 as far as a kernel will read them.
 */
typedef void qkv_tile_load_f32_fn(const float *const *rows, int64_t n_rows, int64_t head_dim,
                                  float *tile);

/*
 * tile_pack copies a block of values into panels of value_panel columns,
 * packed[d / panel][j][d % panel] = values[j][d], the last panel filled up
 * with 0.
 */
typedef void qkv_tile_pack_f32_fn(const float *values, int64_t values_stride, int64_t kv_len,
                                  int64_t value_dim, float *packed);

/*
 * tile_step takes a tile through one block of keys: logits, online softmax,
 * weighted sum. With t_ij = scale_log2 * (query_i . key_j), for every row i
 * over the keys that it sees,
 *
 *     max' = max(max, max_j t_ij)      r = 2^(max - max')     p_j = 2^(t_ij - max')
 *     sum  = sum * r + sum_j p_j
 *     out  = out * r + sum_j p_j value_j
 *
 * with exponentials within 4 u, u = 2^-24 (a weight may be off by 16 u). The
 * driver starts a tile with max = -FLT_MAX (see softmax_step), sum = 0 and
 * out = 0. Keys that a row does not see have no effect on it, not even
 * a NaN or infinity in their key or value.
 */
typedef struct qkv_tile_step_args {
    const float *query;  /* [head_dim][tile_rows], from tile_load */
    const float *keys;   /* [kv_len][head_dim], rows keys_stride apart */
    const float *values; /* from tile_pack, for the same block */
    float *logits;       /* scratch: [key_block][tile_rows] */
    float *out;          /* [value_dim rounded up to panels][tile_rows] */
    float *max, *sum;    /* [tile_rows] */
    /* Row i sees the keys begin[i] <= j < end[i] of the block; both arrays
     * have tile_rows entries within [0, kv_len], or both are NULL: every
     * row sees the whole block. */
    const int32_t *begin, *end;
    int64_t keys_stride;
    int64_t values_keys; /* keys that 'values' was packed with, >= kv_len */
    int64_t n_rows;      /* rows in use, 1..tile_rows */
    int64_t kv_len;      /* 1..key_block */
    int64_t head_dim, value_dim;
    float scale_log2;
    /* A hint: 'ahead_bytes' from each of 'ahead_rows' addresses on will be needed soon
     * after, and are best asked for little by little. */
    const void *const *ahead;
    int64_t ahead_rows, ahead_bytes;
} qkv_tile_step_args;
typedef void qkv_tile_step_f32_fn(const qkv_tile_step_args *args);

/*
 * tile_step in two halves, for logits that something happens to in between
 * (see tile_adjust): tile_logits leaves logits[j][i] = scale_log2 * (query_i .
 * key_j) and nothing else; tile_weigh does the rest from the logits as they
 * are now, with 'max' as the new maximum: [tile_rows], none below a->max nor
 * below a visible logit. Neither looks at 'begin' and 'end': a key that a row
 * does not see has the logit -inf, and the values are all finite.
 */
typedef void qkv_tile_logits_f32_fn(const qkv_tile_step_args *args);
typedef void qkv_tile_weigh_f32_fn(const qkv_tile_step_args *args, const float *max);

/*
 * Attention of few rows on few keys, all of it at once. With t_ij = scale_log2 *
 * (query_i . key_j) over the keys j < ends[i], or over all of them if that is NULL,
 *
 *     max_i = max(-FLT_MAX, max_j t_ij)    p_ij = 2^(t_ij - max_i)    sum_i = sum_j p_ij
 *     out_i = (sum_j p_ij * value_j) / sum_i, or 0 where sum_i is 0
 *
 * Keys from ends[i] on have no effect on row i, whatever they and their values hold.
 * Every row has an address of its own; out[i] may be queries[i], and overlaps nothing
 * else.
 */
typedef struct qkv_short_args {
    const float *const *queries;              /* [rows] */
    const float *const *keys, *const *values; /* [kv_len] */
    float *const *out;                        /* [rows] */
    const int32_t *ends;                      /* [rows], within [0, kv_len], or NULL */
    qkv_row_state *states;                    /* [rows]: max_i and sum_i */
    int64_t rows;
    int64_t kv_len;   /* 1..QKV_SHORT_KEYS */
    int64_t head_dim; /* at most QKV_DOT_BLOCK */
    int64_t value_dim;
    float scale_log2;
} qkv_short_args;
typedef void qkv_short_f32_fn(const qkv_short_args *args);

/* y[i] = tanh(x[i]), in place or not, within 2 ulp. */
typedef void qkv_tanh_f32_fn(const float *x, float *y, int64_t n);

/*
 * From the dot products of one row with n keys to what the softmax takes, in
 * place and in this order:
 *
 *     t_j = logits[j] * scale
 *     t_j = cap * tanh(t_j)                     where cap is not 0
 *     t_j = t_j + slope * (j - behind)          where slope is not 0
 *     t_j = 2 * (t_j + bias[j] * bias_scale)    where bias is given
 *     t_j = -inf                                where bias[j] is -inf, whatever t_j was
 *
 * With a bias the factors make halves of everything, so that neither a logit
 * nor a bias, the lowest finite number above all, overflows by the change of
 * units, but at most their sum.
 */
typedef struct qkv_row_adjust_args {
    float *logits;
    const float *bias; /* [n] or NULL */
    int64_t n;
    float scale, cap, slope, behind, bias_scale;
} qkv_row_adjust_args;
typedef void qkv_row_adjust_f32_fn(const qkv_row_adjust_args *args);

/*
 * The same for a tile of dot products [kv_len][tile_rows], of the first
 * n_rows rows. Row i sees the keys j < end[i] that are not before begin[i] or
 * are before 'sinks'; the others become -inf, whatever they were. max[i]
 * moves up to the row's largest logit. (Lanes from n_rows on may take part.)
 */
typedef struct qkv_tile_adjust_args {
    float *logits;
    const float *scale;          /* [tile_rows] */
    const float *slope, *behind; /* [tile_rows], or both NULL */
    const float *bias;           /* [kv_len][tile_rows] or NULL */
    const int32_t *begin, *end;  /* [tile_rows], or both NULL: every row sees all */
    float *max;                  /* [tile_rows] */
    int64_t n_rows, kv_len;
    int64_t tile_rows; /* a multiple of 4 */
    int32_t sinks;
    float cap, bias_scale;
} qkv_tile_adjust_args;
typedef void qkv_tile_adjust_f32_fn(const qkv_tile_adjust_args *args);

/*
 * tile_store normalises and transposes back: rows[i][d] = out[d][i] / sum[i],
 * or 0 where sum[i] is 0.
 */
typedef void qkv_tile_store_f32_fn(const float *out, const float *sum, int64_t n_rows,
                                   int64_t value_dim, float *const *rows);

/*
 * One panel of a matrix product:
 *
 *     y[i][c] = (accumulate ? y[i][c] : bias ? bias[c] : 0) + sum over k of x[i][k] * panel[k][c]
 *
 * for c < cols <= gemm_cols; 'panel' is packed [depth][gemm_cols], filled up
 * with 0. depth is from 1 to QKV_DOT_BLOCK; the sum is made on its own and
 * added last.
 *
 * Beside this the kernel may copy pieces of gemm_cols elements that a later call
 * needs, as f32, so that waiting for memory is hidden among multiply-adds: as many
 * as 'copy' says or none, and it moves 'copy' on past those it has copied.
 */

/*
 * Pieces of rows to copy. Piece p of the 'panels' pieces of a row goes to
 * to + p * to_stride; the next row is from_stride further in 'from' and goes
 * gemm_cols further in 'to'. The first piece is 'panel' of the first row.
 */
typedef struct qkv_gemm_copy {
    const void *from;
    float *to;     /* overlaps nothing else */
    int32_t dtype; /* of 'from': QKV_F32, QKV_F16 or QKV_BF16 */
    int64_t from_stride, to_stride;
    int64_t panel, panels;
    int64_t pieces; /* to copy, at most the depth of the product */
} qkv_gemm_copy;

typedef struct qkv_gemm_args {
    const float *x, *panel, *bias;
    float *y;
    int64_t x_stride, y_stride;
    int64_t rows, cols, depth;
    bool accumulate;
    qkv_gemm_copy *copy; /* or NULL */
} qkv_gemm_args;
typedef void qkv_gemm_f32_fn(const qkv_gemm_args *args);

/*
 * For few rows: a product with weights where they lie, which are read once and
 * along their rows:
 *
 *     sums[i][c] = (begin ? 0 : sums[i][c]) + x[i][0] * w(0, c) + x[i][1] * w(1, c) + ...
 *
 * with w(k, c) = w[k * w_stride + c], or w[c * w_stride + k] with 'out_in', added
 * in this order and with the rounding of gemm_f32's sums: calls that go through
 * the depth piece by piece have the bits of one through all of it. rows is from 1
 * to few_rows, depth from 1 to few_depth (see isas.def); with 'out_in' any depth.
 *
 * Column c of row i of the sums is c % QKV_FEW_COLS in the block of columns
 * sums + i * sums_stride + c / QKV_FEW_COLS * sums_block.
 */
enum {
    QKV_FEW_ROWS_MAX = 16, /* of all few_rows */
    QKV_FEW_COLS = 16      /* of a block of sums */
};
typedef struct qkv_gemm_few_args {
    const float *x;
    const void *w;
    float *sums; /* overlaps nothing else */
    int64_t x_stride, w_stride, sums_stride, sums_block;
    int64_t rows, cols, depth;
    int32_t dtype; /* of 'w': QKV_F32, QKV_F16 or QKV_BF16 */
    bool begin, out_in;
} qkv_gemm_few_args;
typedef void qkv_gemm_few_fn(const qkv_gemm_few_args *args);

/*
 * y[i] = x[i] in another type; x and y do not overlap. Widening is exact,
 * narrowing rounds once, to nearest, ties to even; a NaN becomes a quiet NaN.
 */
typedef void qkv_widen_f16_fn(const uint16_t *x, float *y, int64_t n);
typedef void qkv_widen_bf16_fn(const uint16_t *x, float *y, int64_t n);
typedef void qkv_narrow_f16_fn(const float *x, uint16_t *y, int64_t n);
typedef void qkv_narrow_bf16_fn(const float *x, uint16_t *y, int64_t n);

/*
 * Rows of a key/value cache. One element e of a row and its value:
 *
 *     f16, bf16         16 bits, IEEE binary16 or the upper half of a binary32
 *     f8_e4m3, f8_e5m2  8 bits, the OCP 8-bit floats: e4m3 has no infinity and
 *                       the NaNs 0x7f and 0xff; e5m2 is the upper half of a
 *                       binary16
 *     q8_0              blocks of 34 bytes: a binary16 scale s, then 32 int8;
 *                       s * e
 *     q4_0              blocks of 18 bytes: a binary16 scale s, then 16 bytes
 *                       that hold the elements 0..15 in their low nibbles and
 *                       16..31 in their high ones; s * (e - 8)
 *     i8                int8, and one f32 scale s a row, kept apart; s * e
 *
 * Numbers are little-endian and aligned to nothing. Rows of blocks have a
 * multiple of QKV_KV_BLOCK elements. All values but those of i8 are exact in
 * f32.
 */
enum {
    QKV_KV_BLOCK = 32,   /* elements of a block */
    QKV_Q8_0_BYTES = 34, /* of a block */
    QKV_Q4_0_BYTES = 18
};

/*
 * One row of a cache to f32: exact, but for i8, whose product with the scale
 * is rounded once. '*scale' is read for i8 only.
 */
typedef void qkv_widen_kv_fn(const void *x, const float *scale, float *y, int64_t n);
typedef qkv_widen_kv_fn qkv_widen_f8_e4m3_fn, qkv_widen_f8_e5m2_fn, qkv_widen_q8_0_fn,
    qkv_widen_q4_0_fn, qkv_widen_i8_fn;

/*
 * One row to a cache: the same bits on every ISA; '*scale' is written for i8
 * only. Below, [x] is x rounded to an integer, ties to even, and every
 * operation is rounded to f32.
 *
 * f8: rounded once, to nearest, ties to even; whatever lies beyond the
 * largest finite number, infinity too, becomes that number with its sign; a
 * NaN stays one.
 *
 * q8_0 (a block) and i8 (the row): d = (largest |x|) / 127, e = [x * (1 / d)].
 * The scale is d, for q8_0 rounded to binary16.
 *
 * q4_0: d = m / -8, where m is the first of the elements of largest
 * magnitude; e = min(15, (x * (1 / d) + 8.5) without its fraction). The
 * scale is d rounded to binary16.
 *
 * Where |d| < 2^-126, 0 stands in for 1 / d, and for the scale of i8. For
 * q8_0 and q4_0 |d| is at most 65504, the largest binary16, and x * (1 / d) is
 * limited to -127..127 or -8..7. If any x is a NaN or infinite the scale is
 * a NaN and every value with it: the integers are 0, or 8 for q4_0.
 */
typedef void qkv_narrow_kv_fn(const float *x, void *y, float *scale, int64_t n);
typedef qkv_narrow_kv_fn qkv_narrow_f8_e4m3_fn, qkv_narrow_f8_e5m2_fn, qkv_narrow_q8_0_fn,
    qkv_narrow_q4_0_fn, qkv_narrow_i8_fn;

/*
 * Rotary position embedding of 2 * pairs elements: pair i, (a, b), becomes
 * (a * cosines[i] - b * sines[i], a * sines[i] + b * cosines[i]), nothing
 * fused. A pair is x[2i], x[2i + 1], or without 'neighbours' x[i], x[i +
 * pairs]. y overlaps nothing.
 */
typedef void qkv_rotary_f32_fn(const float *x, const float *cosines, const float *sines, float *y,
                               int64_t pairs, bool neighbours);

/* The kernels of one ISA and the sizes that its tiles have. */
typedef struct qkv_kernels {
    const char *name;
    int32_t tile_rows, key_block, value_panel, gemm_cols, row_limit, row_limit_narrow, short_rows;
    int32_t few_rows, few_depth;
#define QKV_KERNEL(op, scalar, avx2, avx512, neon) qkv_##op##_fn *op;
#include "kernels.def"
#undef QKV_KERNEL
} qkv_kernels;

/* The number of an ISA in isas.def, and how many there are. */
enum {
#define QKV_ISA(name, ...) QKV_ISA_##name,
#include "isas.def"
#undef QKV_ISA
    QKV_ISA_COUNT
};

/* The tile sizes of an ISA as constants, for its kernels: QKV_avx2_tile_rows. */
enum {
#define QKV_ISA(name, arch, tile_rows_, key_block_, value_panel_, gemm_cols_, row_limit_,          \
                row_limit_narrow_, short_rows_, few_rows_, few_depth_)                             \
    QKV_##name##_tile_rows = (tile_rows_), QKV_##name##_key_block = (key_block_),                  \
    QKV_##name##_value_panel = (value_panel_), QKV_##name##_gemm_cols = (gemm_cols_),              \
    QKV_##name##_row_limit = (row_limit_), QKV_##name##_row_limit_narrow = (row_limit_narrow_),    \
    QKV_##name##_short_rows = (short_rows_), QKV_##name##_few_rows = (few_rows_),                  \
    QKV_##name##_few_depth = (few_depth_),
#include "isas.def"
#undef QKV_ISA
    QKV_ISA_SIZES_END
};

/* The prototypes: each kernel of each variant. */
#define QKV_KERNEL(op, scalar, avx2, avx512, neon)                                                 \
    extern qkv_##op##_fn qkv_##op##_##scalar, qkv_##op##_##avx2, qkv_##op##_##avx512,              \
        qkv_##op##_##neon;
#include "kernels.def"
#undef QKV_KERNEL

/* The widest tile of any ISA, for arrays on a driver's stack. */
enum { QKV_TILE_ROWS_MAX = 48 };

/* The table in use; never NULL. Lock-free, detects the CPU at first use. */
const qkv_kernels *qkv_kernels_active(void);

/* The table of an ISA of isas.def, or NULL where it is not compiled in. */
const qkv_kernels *qkv_kernels_of(int isa);

#endif
