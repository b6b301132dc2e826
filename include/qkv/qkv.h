/* SPDX-License-Identifier: MIT */
/*
 * qkv: transformer self-attention on CPUs.
 *
 * For query vectors q_i, key vectors k_j and value vectors v_j,
 *
 *     logit(i, j) = scale * (q_i . k_j)                    scale = 1/sqrt(head_dim)
 *     weight(i, j) = exp(logit(i, j) - max_i) / sum over j' of exp(logit(i, j') - max_i)
 *     out_i = sum over j of weight(i, j) * v_j
 *
 * where max_i is the largest logit of row i (Vaswani et al., "Attention Is
 * All You Need", 2017, equation 1). The library offers the three steps one
 * by one (qkv_dot, qkv_scale_softmax, qkv_weighted_sum), the three fused
 * without ever storing the matrix of logits (qkv_attention), and the layer
 * around them (qkv_project, qkv_self_attention).
 *
 * Conventions that hold for every function:
 *
 * - Sizes and strides are int64_t. Strides count elements, never bytes. The
 *   elements of one row are contiguous.
 * - Every function that can fail returns a qkv_status. All arguments are
 *   checked before the first byte of output is written: on an error the
 *   outputs are as they were.
 * - No function reads or writes a byte outside the elements that its
 *   arguments describe, not even within the same page. Pointers need only
 *   the alignment of their element, scratch memory excepted.
 * - No compute function allocates, locks, makes a system call, prints or
 *   changes the floating-point control modes (arithmetic may raise status
 *   flags). Scratch memory is the caller's; a size query tells how much. What
 *   it holds before and after means nothing, and it is best kept from call to
 *   call.
 * - Every function is thread-safe and reentrant as long as no two calls
 *   share an output or scratch memory. The library starts no threads
 *   but those of a pool that the caller creates.
 * - The machine code is chosen at run time, once, from what both the CPU
 *   and the operating system confirm; see qkv_isa_select().
 * - The bits of an output row depend on the inputs of its own sequence and
 *   head group, q_len, kv_len and the options, and on the ISA; not on the
 *   batch around it, on alignment, or on how tasks are spread over threads.
 *
 * Numerics (kernels/NUMERICS.md has the derivations and what was measured).
 * With u = 2^-24, n = head_dim, B = QKV_KEY_BLOCK, L = kv_len, and ds the
 * largest error of a logit of the row, ds <= (n + 2) u |scale| sum |q_i k_i|:
 *
 * - a dot product of n <= 4096 terms: |error| <= (n + 2) u sum |q_i k_i|;
 *   a longer one is summed in blocks of 4096;
 * - exp: within 1 ulp on [-87.3, 0], exp(0) = 1, monotone; below that a
 *   denormal or 0, and 0 from -104 on;
 * - weights: relative error <= 2 ds + (ceil(log2(ceil(L/B))) + 16) u, and they
 *   sum to 1 within (B + L/B + 16) u;
 * - attention: |error| <= sum_j weight_j |v_j| (2 ds + (B + L/B + 32) u).
 *
 * With keys of QKV_Q8_0, QKV_Q4_0 or QKV_I8 the queries may be rounded to 16 bits
 * for products of integers: ds grows by max|q_i| |scale| sum |k_i| / 65534.
 *
 * These are bounds of rounding. Underflow adds an absolute term that only
 * matters near the smallest normal number: a weight below 2^-126 may be 0,
 * and a product below 2^-126 may lose up to 2^-149.
 * The caller's modes are respected. While denormals are flushed to 0, the
 * absolute term is up to 2^-125 for each product. In a directed rounding mode
 * the bounds hold with u = 2^-23, and what else is promised of single bits
 * (exact conversions aside) holds only when rounding to nearest.
 * Overflow is that of f32: of a dot product, of a logit with all that is
 * scaled and added, and, as attention divides last, of a sum of weighted
 * values. Logits up to FLT_MAX are right; but a row whose largest one is
 * beyond 2.3e38 or below -2.3e38 (FLT_MAX / log2(e)) is made a second time,
 * slowly.
 *
 * Special values, the same in every function and on every ISA:
 *
 * - A row that sees no key (kv_len is 0, or every key is masked) has the
 *   output 0 and the log-sum-exp -infinity.
 * - Keys and values that a row does not see have no effect on it, whatever
 *   bits they hold: those beyond a length, the causal edge or a window, those
 *   that a tree or a boolean mask hides, and those whose added mask is
 *   -infinity.
 * - A NaN in a query, or in a key or value that a row sees, makes that
 *   row's result NaN where arithmetic says so, and no other row's.
 * - A logit of +infinity gives what arithmetic gives on logit - max: the
 *   whole row is NaN. A logit of -infinity has the weight 0.
 */
#ifndef QKV_QKV_H
#define QKV_QKV_H

#include <stddef.h>
#include <stdint.h>

#include <qkv/version.h>

#if defined(QKV_STATIC)
#define QKV_API
#elif defined(_WIN32)
#ifdef QKV_BUILDING
#define QKV_API __declspec(dllexport)
#else
#define QKV_API __declspec(dllimport)
#endif
#elif defined(__GNUC__)
#define QKV_API __attribute__((visibility("default")))
#else
#define QKV_API
#endif

#ifdef __cplusplus
extern "C" {
#endif

/* Keys are summed in blocks of at most this many; see the numerics above. */
#define QKV_KEY_BLOCK 512

/* Scratch memory must be aligned to this many bytes. */
#define QKV_SCRATCH_ALIGN 64

/* ---------------------------------------------------------------- status */

/* What a call returns. 0 is success; the values never change meaning. */
typedef int32_t qkv_status;

enum {
    QKV_OK = 0,
    QKV_E_NULL = 1,         /* a required pointer is NULL */
    QKV_E_SIZE = 2,         /* a descriptor's 'size' is not one of this library's */
    QKV_E_FLAGS = 3,        /* an unknown flag, or flags or fields that exclude each other */
    QKV_E_SHAPE = 4,        /* a negative or impossible size; heads not a multiple of kv_heads;
                               starts that fall, or starts and lengths beyond the rows there are */
    QKV_E_STRIDE = 5,       /* a negative stride, or an output whose rows overlap */
    QKV_E_DTYPE = 6,        /* an unknown dtype, or one that this call does not take */
    QKV_E_ALIGN = 7,        /* a pointer is not aligned to its element */
    QKV_E_OVERLAP = 8,      /* an output overlaps an input or another output */
    QKV_E_OVERFLOW = 9,     /* a size in bytes does not fit the address space */
    QKV_E_SCRATCH = 10,     /* scratch memory is missing, too small or misaligned */
    QKV_E_VALUE = 11,       /* a scale that is not finite, or not after a factor of log2(e); a
                               softcap that is negative, not finite or too small for the scale;
                               a stage of weights that there is not */
    QKV_E_ISA = 12,         /* no such ISA, or this machine does not support it */
    QKV_E_INDEX = 13,       /* a task, a worker or an entry of the page table is out of range, or
                               pages of a shared prefix are not the same */
    QKV_E_UNSUPPORTED = 14, /* described correctly, but not offered by this version */
    QKV_E_SYSTEM = 15       /* the system has no memory or no thread left */
};

/*
 * qkv_strerror() describes a status in one line. Never NULL, also for a
 * number that is no status. The string is static. Since 0.1.
 */
QKV_API const char *qkv_strerror(qkv_status status);

/* qkv_version() is QKV_VERSION of the linked library. Since 0.1. */
QKV_API int qkv_version(void);

/* ------------------------------------------------------------------ ISAs */

/* One instruction set that the library knows on this architecture. */
typedef struct qkv_isa_info {
    const char *name;   /* "scalar", "avx2", "avx512", "neon" */
    int32_t compiled;   /* 1: its kernels are in this library */
    int32_t supported;  /* 1: CPU and operating system both confirm it */
    int32_t selected;   /* 1: calls made now use it */
    const char *reason; /* one line: why it is selected, or why it is not */
} qkv_isa_info;

/*
 * qkv_isa_count() is the number of ISAs the library knows; qkv_isa_get()
 * describes the one at 'index', lowest first. Strings are static.
 * Returns QKV_OK, QKV_E_NULL or QKV_E_INDEX. Since 0.1.
 */
QKV_API int32_t qkv_isa_count(void);
QKV_API qkv_status qkv_isa_get(int32_t index, qkv_isa_info *info);

/*
 * qkv_isa_select() makes later calls use the ISA called 'name'; NULL returns
 * to the automatic choice, the highest supported one. Calls in flight on
 * other threads keep the ISA they began with.
 *
 * The environment variable QKV_ISA, read once at first use, lowers the
 * automatic choice to the ISA it names; a name that is unknown, or not
 * supported here, is ignored, and qkv_isa_get() tells so in 'reason'.
 *
 * Returns QKV_OK, or QKV_E_ISA for a name that is unknown, not compiled in
 * or not supported here; then nothing changes. Since 0.1.
 */
QKV_API qkv_status qkv_isa_select(const char *name);

/* qkv_isa_name() is the name of the ISA in use now. Since 0.1. */
QKV_API const char *qkv_isa_name(void);

/* ----------------------------------------------------------- the 3 steps */

/*
 * qkv_dot() computes the score of each query against each key,
 *
 *     scores[i][j] = sum over d of queries[i][d] * keys[j][d]
 *
 * for 'rows' queries and 'kv_len' keys of 'head_dim' f32 elements. Row i of
 * a matrix begins i times its stride after its first element; a stride of 0
 * for 'queries' or 'keys' repeats one row. 'scores' must not overlap an
 * input, and 'scores_stride' is at least kv_len where rows > 1. With rows
 * or kv_len 0 nothing is written; with head_dim 0 the scores are 0.
 *
 * Error: |scores - exact| <= (n + 2) 2^-24 sum |q_d k_d| with
 * n = min(head_dim, 4096) + ceil(head_dim / 4096) - 1.
 * Returns QKV_OK, or QKV_E_NULL / _SHAPE / _STRIDE / _ALIGN / _OVERLAP /
 * _OVERFLOW, in which case nothing is written. Since 0.1.
 */
QKV_API qkv_status qkv_dot(const float *queries, int64_t queries_stride, const float *keys,
                           int64_t keys_stride, float *scores, int64_t scores_stride, int64_t rows,
                           int64_t kv_len, int64_t head_dim);

/*
 * qkv_scale_softmax() computes, for each of 'rows' rows of 'kv_len' scores,
 *
 *     weights[i][j] = exp(s_j - m) / sum over j' of exp(s_j' - m)
 *     lse[i] = m + ln(sum over j' of exp(s_j' - m))
 *
 * with s_j = scale * scores[i][j] and m = max s_j. 'weights' may be 'scores'
 * itself with the same stride; any other overlap is refused. 'lse' holds
 * 'rows' contiguous elements, or is NULL. A row of nothing but -infinity
 * becomes zeros with lse -infinity, as does the lse of an empty row; a row
 * with a NaN or with +infinity becomes NaN.
 *
 * Error of a weight, relative: <= 2 ds + (ceil(log2(ceil(kv_len/B))) + 16) 2^-24
 * with B = QKV_KEY_BLOCK and ds = 3 * 2^-24 max |s_j|.
 * Returns QKV_OK, or QKV_E_NULL / _SHAPE / _STRIDE / _ALIGN / _OVERLAP /
 * _OVERFLOW / _VALUE (scale not finite), in which case nothing is written.
 * Since 0.1.
 */
QKV_API qkv_status qkv_scale_softmax(const float *scores, int64_t scores_stride, float *weights,
                                     int64_t weights_stride, float *lse, int64_t rows,
                                     int64_t kv_len, float scale);

/*
 * qkv_weighted_sum() computes, for each of 'rows' weight rows,
 *
 *     out[i][d] = sum over j of weights[i][j] * values[j][d]
 *
 * 'values' has 'kv_len' rows of 'value_dim' elements. A weight of exactly 0
 * contributes nothing, even where its value row holds a NaN. With kv_len 0
 * the output is 0. A stride of 0 for an input repeats one row; 'out' must
 * not overlap an input, and 'out_stride' is at least value_dim where
 * rows > 1.
 *
 * Error: |out - exact| <= (B + ceil(kv_len/B) + 8) 2^-24 sum |w_j v_j|,
 * B = QKV_KEY_BLOCK.
 * Returns QKV_OK, or QKV_E_NULL / _SHAPE / _STRIDE / _ALIGN / _OVERLAP /
 * _OVERFLOW, in which case nothing is written. Since 0.1.
 */
QKV_API qkv_status qkv_weighted_sum(const float *weights, int64_t weights_stride,
                                    const float *values, int64_t values_stride, float *out,
                                    int64_t out_stride, int64_t rows, int64_t kv_len,
                                    int64_t value_dim);

/* --------------------------------------------------------------- tensors */

/*
 * Element types. QKV_F32, QKV_F16 and QKV_BF16 are taken in queries, keys,
 * values, outputs, tokens and weight matrices, each on its own, and by
 * qkv_attention() the others up to QKV_Q4_0 in keys and values too; scales,
 * biases of projections and all numbers of a row are f32. Inputs convert to
 * f32 exactly (with QKV_I8 a product with the scale is rounded once),
 * arithmetic is f32, and a 16-bit output is the f32 result rounded once, to
 * nearest, ties to even. Storage types are plain integers: nothing here needs
 * a compiler that knows half precision.
 *
 * QKV_Q8_0 and QKV_Q4_0 store 32 elements in a block of 34 or 18 bytes: an
 * f16 scale, then int8; or nibbles, those of the elements 0 .. 15 low and of
 * 16 .. 31 high, each less 8. Row sizes and strides count elements and are
 * multiples of 32; the data may have any alignment.
 */
enum {
    QKV_F32 = 0,     /* IEEE binary32 */
    QKV_F16 = 1,     /* IEEE binary16 */
    QKV_BF16 = 2,    /* the upper half of a binary32 */
    QKV_Q8_0 = 3,    /* blocks of 32 int8 with one f16 scale, as in GGUF files */
    QKV_I8 = 4,      /* int8 with one scale per token and head */
    QKV_F8_E4M3 = 5, /* OCP 8-bit float, 4 exponent bits */
    QKV_F8_E5M2 = 6, /* OCP 8-bit float, 5 exponent bits */
    QKV_Q4_0 = 7,    /* blocks of 32 4-bit integers, as in GGUF files */
    QKV_BOOL = 8,    /* masks only: a byte, 0 or 1 */
    QKV_BIT = 9      /* masks only: a bit, the lowest of a byte first */
};

enum {
    /* Take the strides as they stand even if all of them are 0. */
    QKV_TENSOR_STRIDED = 1
};

/*
 * A tensor of rows: element (b, h, i, d) is at
 * data + b * stride_batch + h * stride_head + i * stride_row + d.
 *
 * If all strides are 0 (and QKV_TENSOR_STRIDED is not set) the tensor is
 * packed in the order [batch][head][row][element]. Otherwise the strides
 * are used as they stand, and one of 0 repeats the same memory along its
 * axis (inputs only). Strides must not be negative. A stride along an axis
 * of size 1 is ignored.
 */
typedef struct qkv_tensor {
    void *data; /* not written through where the tensor is an input */
    int64_t stride_batch, stride_head, stride_row;
    int32_t dtype; /* QKV_F32, ... */
    int32_t flags; /* QKV_TENSOR_... */
} qkv_tensor;

/* ------------------------------------------------------- fused attention */

enum {
    /*
     * Query i sees the keys 0 .. i + kv_len - q_len: the last query sees
     * all of them, as decoding with a cache needs. Where q_len > kv_len the
     * first q_len - kv_len queries see none.
     */
    QKV_CAUSAL = 1,
    /* 'scale' is set, even if it is 0. */
    QKV_SCALE_SET = 2,
    /* 'window_left' and 'window_right' are set, even if they are 0. */
    QKV_WINDOW = 8,
    /*
     * The bits of a row do not depend on q_len either: several drafted
     * tokens that are verified at once get the bits that decoding them one
     * by one, with this flag too, gives. (Where the default q_offsets move
     * along with kv_len, as a cache's do.) Few queries then take the kernels
     * that many take, which costs a few queries time, and many none.
     */
    QKV_INVARIANT = 16,
    /*
     * For tasks: those of few queries against many keys are cut along the keys
     * too, so that several threads can share one sequence. Changes no bit of a
     * result, but how much scratch memory it takes; see
     * qkv_attention_scratch_size(). Needs qkv_attention_begin().
     */
    QKV_SPLIT = 32
};

/* What the optional output 'weights' holds of every query and key. */
enum {
    QKV_WEIGHTS_SOFTMAX = 0, /* the weights; 0 for a key that is not seen */
    QKV_WEIGHTS_SCALED = 1,  /* scale * query . key, seen or not */
    QKV_WEIGHTS_CAPPED = 2,  /* the same after the softcap */
    QKV_WEIGHTS_MASKED = 3   /* the logits; -infinity for a key that is not seen */
};

/*
 * A mask over queries and keys: element (b, h, i, j) is at
 * data + b * stride_batch + h * stride_head + i * stride_query + j * stride_key,
 * strides counting elements, which are bits for QKV_BIT. A stride of 0
 * repeats the mask along its axis; if all are 0 (and QKV_TENSOR_STRIDED is
 * not set) it is packed, [batch][q_heads][q_len][kv_len]. b is the sequence,
 * and i and j count within it, in ragged batches too.
 *
 * A key that a boolean mask does not show (any byte but 0 shows) is hidden
 * like one behind the causal edge, and so is one whose added number is
 * -infinity: neither it nor its value has an effect, be they NaN. Every
 * finite number is a bias, the lowest one too: a row that has -FLT_MAX on
 * every key attends to all of them. (Such a row takes several times as long as
 * one that -infinity hides. A sum with the logit that overflows to -infinity
 * has the weight 0.)
 * Keys and values of a block of keys that the mask hides from every query of
 * a tile are not read.
 */
typedef struct qkv_mask {
    const void *data; /* NULL: none */
    int64_t stride_batch, stride_head, stride_query, stride_key;
    int32_t dtype; /* QKV_F32, QKV_F16, QKV_BF16: added; QKV_BOOL, QKV_BIT: 1 is seen */
    int32_t flags; /* QKV_TENSOR_... */
} qkv_mask;

/*
 * One attention problem. Fill it with a designated initialiser: a field
 * that is left 0 takes its default.
 *
 *     qkv_attention_desc desc = {
 *         .size = sizeof desc, .q_heads = 8, .kv_heads = 2,
 *         .q_len = 16, .kv_len = 100, .head_dim = 64,
 *         .query = {.data = q}, .key = {.data = k}, .value = {.data = v},
 *         .out = {.data = o},
 *     };
 *
 * 'size' lets new fields be appended: a program compiled with an older
 * header keeps working, and one compiled with a newer header is refused
 * only if it sets a field that this library does not know. A smaller size that
 * no version had is refused.
 */
typedef struct qkv_attention_desc {
    size_t size;   /* sizeof(qkv_attention_desc) */
    int32_t flags; /* QKV_CAUSAL, QKV_SCALE_SET, ... */
    float scale;   /* 0 without QKV_SCALE_SET: 1/sqrt(head_dim) */

    int64_t batch;     /* 0: 1 */
    int64_t q_heads;   /* 0: 1 */
    int64_t kv_heads;  /* 0: q_heads. Divides q_heads: query head h reads
                          key/value head h / (q_heads / kv_heads) */
    int64_t q_len;     /* queries a head; with 0 nothing is written */
    int64_t kv_len;    /* keys a head; with 0 the output is 0 */
    int64_t head_dim;  /* elements of a query and a key, from 1 on */
    int64_t value_dim; /* elements of a value and an output; 0: head_dim */

    qkv_tensor query; /* [batch][q_heads][q_len][head_dim] */
    qkv_tensor key;   /* [batch][kv_heads][kv_len][head_dim] */
    qkv_tensor value; /* [batch][kv_heads][kv_len][value_dim] */
    qkv_tensor out;   /* [batch][q_heads][q_len][value_dim] */

    /*
     * Optional (data NULL: none): the log-sum-exp of every row, natural
     * logarithm, f32, [batch][q_heads][q_len]. stride_row is the distance
     * from one query's to the next.
     */
    qkv_tensor lse;

    /*
     * Everything below changes nothing where it is left 0 or NULL.
     *
     * Ragged batches. With 'q_starts' ([batch + 1], from 0 on, not falling)
     * the query, out and lse tensors have no batch axis (stride_batch is
     * ignored): sequence b owns their rows q_starts[b] .. q_starts[b + 1] - 1
     * of q_len. Rows that no sequence owns are not written. With 'kv_starts'
     * ([batch + 1]) the same holds for key and value and kv_len. 'kv_lens'
     * ([batch]) gives every sequence a length of its own within its rows:
     * keys from there on do not exist. The arrays must not overlap an output.
     */
    const int64_t *q_starts, *kv_starts, *kv_lens;

    /*
     * Sequence b's query i stands at the position i + q_offsets[b], which
     * is what causal masks, windows and slopes go by; key j stands at j. It
     * may be negative, or beyond the keys. NULL: the sequence's kv_len minus
     * its q_len, the queries being the newest tokens.
     */
    const int64_t *q_offsets;

    /*
     * Pages. With a 'page_size' (a power of two, 8 to 256) key and value
     * are pools [pages][kv_heads][page_size][dim], stride_batch being the
     * distance from page to page: key j of sequence b lies in row
     * j % page_size of page page_table[b * page_table_stride + j / page_size].
     * Sequences may share pages. kv_len is the length of every sequence, or
     * with 'kv_lens' the most that one may have; entries beyond a sequence's
     * length are not read, nor are the rows of its last page. A
     * page_table_stride of 0 stands for ceil(kv_len / page_size); one that is
     * too short for a sequence gives QKV_E_SHAPE. kv_starts and pages exclude
     * each other.
     */
    int64_t page_size, pages, page_table_stride;
    const int32_t *page_table;

    /* For QKV_I8, and only there: the scale of every row, f32, [batch or
     * page][kv_heads][row], as the key and value tensors. */
    qkv_tensor key_scale, value_scale;

    /*
     * What happens to a logit, in this order:
     *
     *     t = scale * head_scales[h] * (q . k)
     *     t = softcap * tanh(t / softcap)       with a softcap
     *     t = t + slopes[h] * (j - p)           with slopes
     *     t = t + mask                          with an additive mask
     *     t = -infinity                         if any rule hides the key
     *
     * and a key is hidden by its length, causal order, window, tree or mask,
     * each on its own. Its error is that of the numerics above, with u times
     * 7 |t| more for a softcap, 3 |slope (j - p)| + |t| for slopes and 2 |mask|
     * + |t| for a mask.
     *
     * With QKV_WINDOW: the query at position p sees the keys p - window_left
     * .. p + window_right only; a negative width has no limit. The first
     * 'sink_tokens' keys are always within the window. (The causal flag and
     * the masks can still hide them.) Of the other keys outside, and their
     * values, those in the blocks of at most QKV_KEY_BLOCK keys where the window
     * begins and ends may be read, all others are not: time grows with the window,
     * not with the length. Without the flag all three are 0.
     */
    int64_t window_left, window_right, sink_tokens;

    /* 0: none. Finite and positive otherwise; within 2 ulp of the exact tanh. */
    float softcap;
    int32_t weights_stage; /* what 'weights' holds: QKV_WEIGHTS_... */

    /* A mask of every query and key: added to the logit, or what is seen. */
    qkv_mask mask;

    /*
     * For drafted trees of tokens: bit j of row i tells whether query i sees
     * the sequence's key kv_len - q_len + j; all older keys are seen. Bit j is
     * bit j % 64 of word j / 64 of the row, the lowest first. Row i of sequence
     * b begins at word (first row of b + i) * tree_stride, its first row being
     * b * q_len or q_starts[b]; tree_stride is at least ceil(q_len / 64).
     */
    const uint64_t *tree_mask;
    int64_t tree_stride;

    /*
     * One number a query head, [q_heads], or NULL. 'slopes' as above (ALiBi;
     * qkv_alibi_slopes() has the usual ones); 'head_scales' beside the scale;
     * 'sinks' are logits that take part in the softmax of every row of the
     * head but have no value: the weights of a row then sum to less than 1, and
     * its log-sum-exp and maximum count the sink. A row that sees no key has
     * the output 0 and its sink as log-sum-exp. A sink of -infinity is none.
     */
    const float *slopes, *head_scales, *sinks;

    /*
     * Optional outputs, f32 (data NULL: none): the largest logit of every row,
     * strided as lse is, -infinity for a row that sees no key; and a number
     * for every query and key, [batch][q_heads][q_len][kv_len], which
     * 'weights_stage' chooses. The matrix costs the time of making all logits
     * again: it is there to look at, and for small cases. Entries of keys that
     * do not exist are 0, or -infinity with QKV_WEIGHTS_MASKED; but all weights
     * of a row whose sum is a NaN are NaN.
     */
    qkv_tensor row_max, weights;

    /*
     * A prefix that sequences share: the first 'shared_len' keys and values are
     * the same in all sequences (in those that have fewer, all of theirs). Of
     * each QKV_KEY_BLOCK keys in it one sequence's are then read for all, as
     * long as sequences have few queries (decoding), see all of it and there
     * is no mask and no tree. This changes no bit of a result. With pages the
     * sequences' first shared_len / page_size entries must be equal; without,
     * that the memory holds the same is the caller's word. Sequences that go
     * together are one task a key/value head, up to 64 query rows of it, with
     * QKV_SPLIT too. Needs qkv_attention_begin(). At most kv_len. 0: none.
     */
    int64_t shared_len;
} qkv_attention_desc;

/* Which kind of code a descriptor takes. */
enum {
    QKV_PATH_NONE = 0,   /* nothing to compute: an empty output, or no key */
    QKV_PATH_TUNED = 1,  /* the tiled kernels made for its kind of shape */
    QKV_PATH_GENERAL = 2 /* right, but not tuned: a very large head_dim */
};

typedef struct qkv_attention_support {
    int32_t path;      /* QKV_PATH_... */
    const char *isa;   /* the ISA that would run it, a static string */
    const char *route; /* a static word for the driver, "tile" or "row" (of few keys
                          too): "tile" if some sequence takes it */
} qkv_attention_support;

/*
 * qkv_attention_supports() tells, without doing any work or reading an
 * element of a tensor, what qkv_attention() would return for 'desc' (scratch
 * memory aside) and which path it would take. 'support' may be NULL. Since 0.1.
 */
QKV_API qkv_status qkv_attention_supports(const qkv_attention_desc *desc,
                                          qkv_attention_support *support);

/*
 * qkv_alibi_slopes() writes the slopes that models with ALiBi are trained
 * with (Press et al. 2022): 2^(-8 (h + 1) / n) for head h of n where n is a
 * power of two; otherwise those of the largest power of two below n, followed
 * by every second one, the first included, of twice as many heads.
 * Returns QKV_OK, QKV_E_SHAPE for heads < 0, QKV_E_NULL, _ALIGN or _OVERFLOW.
 * Since 0.1.
 */
QKV_API qkv_status qkv_alibi_slopes(float *slopes, int64_t heads);

/*
 * qkv_attention_scratch_size() stores in '*bytes' how much scratch memory
 * qkv_attention() needs for 'desc' with 'workers' threads (1 for
 * qkv_attention() itself). It depends on workers, head sizes, dtypes, which
 * options are used and the ISA alone, not on batch, heads, q_len or kv_len:
 * one buffer serves every call of a model, from a single token to the longest
 * prompt. (A problem with nothing to write needs none.)
 *
 * Tasks that need qkv_attention_begin() share a part of it that depends on
 * more: less than 2 KiB, and 40 bytes a sequence. With QKV_SPLIT there are 4
 * bytes more for each key/value head of each sequence, and where a key/value
 * head has R <= 16 query rows (q_heads / kv_heads * q_len), about
 * 4 * R * (value_dim + 2) bytes for each of its parts of the keys: one for
 * every 512 keys, at most 64; with more rows as much as for 16, since calls
 * with fewer may follow. Without arrays of lengths this counts the
 * longest that a sequence may be, so that the size for the most sequences and
 * keys of a model serves every batch of it.
 * Returns QKV_OK, what qkv_attention() would return for the descriptor,
 * QKV_E_INDEX for workers < 1 or QKV_E_OVERFLOW. Since 0.1.
 */
QKV_API qkv_status qkv_attention_scratch_size(const qkv_attention_desc *desc, int64_t workers,
                                              size_t *bytes);

/*
 * qkv_attention() computes out = softmax(scale * query . key^T) value for
 * every batch and head; the matrix of logits is never stored. 'scratch' is
 * aligned to QKV_SCRATCH_ALIGN and overlaps none of the tensors.
 *
 * 'out' may be the query tensor itself (same address and strides, and
 * value_dim = head_dim); any other overlap of an output is refused. Inputs may
 * overlap: of a latent cache the values are a prefix of the keys, the same
 * memory with a smaller value_dim.
 *
 * Returns QKV_OK, or any of the codes above but QKV_E_ISA, in which case nothing
 * is written. Since 0.1.
 */
QKV_API qkv_status qkv_attention(const qkv_attention_desc *desc, void *scratch,
                                 size_t scratch_size);

/*
 * The same work as numbered tasks, for callers with threads of their own.
 * qkv_attention_task_count() stores how many tasks 'desc' splits into; each
 * of 0 .. count - 1 is run once by qkv_attention_run_task(), in any order
 * and on any thread, though in rising order threads that take the next one
 * when they are free end at about the same time. Tasks never wait for each
 * other and give the same bits however they are spread. 'worker' (from 0 to
 * workers - 1 of the size query) picks the part of 'scratch' to use; two
 * calls at the same time need different workers. Select no other ISA
 * between the size query and the last task.
 *
 * A descriptor with QKV_SPLIT, with arrays of starts, lengths or offsets, with
 * pages or a shared prefix needs qkv_attention_begin() first, once for every
 * time that all its tasks are run: it checks the whole descriptor and writes
 * into 'scratch' who does what; 'scratch_size' is that of all workers, none of
 * whose parts may overlap a tensor. Until the last task has ended the
 * descriptor, its arrays and that memory must not change, and the tasks must
 * see what begin has written, as they do in threads that are started or woken
 * after it. For any other descriptor begin does nothing but check.
 *
 * qkv_attention_run_task() returns like qkv_attention(); QKV_E_INDEX for a
 * task out of range or a negative worker, QKV_E_SCRATCH for a worker whose
 * part lies beyond 'scratch_size', and where qkv_attention_begin() is needed
 * and this descriptor was not given to it. Since 0.1.
 */
QKV_API qkv_status qkv_attention_task_count(const qkv_attention_desc *desc, int64_t *count);
QKV_API qkv_status qkv_attention_begin(const qkv_attention_desc *desc, void *scratch,
                                       size_t scratch_size);
QKV_API qkv_status qkv_attention_run_task(const qkv_attention_desc *desc, int64_t task,
                                          int64_t worker, void *scratch, size_t scratch_size);

/*
 * A parallel-for: calls body(argument, i) once for every i from 0 to n - 1,
 * on any threads, and returns when all calls have. It may run them one after
 * the other. 'context' is whatever it needs.
 */
typedef void qkv_parallel_body(void *argument, int64_t i);
typedef void qkv_parallel_for(void *context, int64_t n, qkv_parallel_body *body, void *argument);

/*
 * qkv_attention_parallel() is qkv_attention() on the threads of a
 * parallel-for. It calls 'parallel_for' once, with n <= workers; each call of
 * the body takes tasks as long as there are any, so that the work is balanced
 * however the calls are spread. 'scratch' is as large as the size query says
 * for 'workers'; with QKV_SPLIT in the descriptor's flags a few long sequences
 * occupy many threads. The bits are those of qkv_attention().
 *
 * Returns like qkv_attention(); QKV_E_INDEX for workers < 1. Since 0.1.
 */
QKV_API qkv_status qkv_attention_parallel(const qkv_attention_desc *desc, void *scratch,
                                          size_t scratch_size, int64_t workers,
                                          qkv_parallel_for *parallel_for, void *context);

/*
 * A pool of POSIX threads for those who have none. qkv_pool_create() starts
 * workers - 1 threads, which sleep until qkv_pool_parallel_for(), a
 * qkv_parallel_for with the pool as its context, has work for them and its
 * caller; it gives the indices out one by one. One pool serves one caller at
 * a time, and must not be NULL there. qkv_pool_destroy() ends the threads;
 * NULL is let pass.
 *
 * These functions allocate, lock and wait; nothing else in the library uses
 * them. Returns QKV_OK, QKV_E_NULL, QKV_E_INDEX for a number of workers that
 * is not from 1 to 4096, or QKV_E_SYSTEM. Since 0.1.
 */
typedef struct qkv_pool qkv_pool;
QKV_API qkv_status qkv_pool_create(int64_t workers, qkv_pool **pool);
QKV_API void qkv_pool_destroy(qkv_pool *pool);
QKV_API void qkv_pool_parallel_for(void *pool, int64_t n, qkv_parallel_body *body, void *argument);

/*
 * Outputs of the same queries against different keys, to be joined.
 * part_out[i] points to part i's outputs, 'rows' rows of 'value_dim' elements,
 * 'out_stride' elements apart (0: packed), part_lse[i] to its 'rows'
 * log-sum-exps, all f32; 'out' and 'lse' (NULL: not wanted) are laid out alike.
 */
typedef struct qkv_merge_desc {
    size_t size;      /* sizeof(qkv_merge_desc) */
    int32_t flags;    /* 0 */
    int32_t reserved; /* 0 */
    int64_t parts, rows, value_dim, out_stride;
    const float *const *part_out;
    const float *const *part_lse;
    float *out, *lse;
} qkv_merge_desc;

/*
 * qkv_merge() makes of partial outputs what attention to all their keys
 * together would have given:
 *
 *     out = sum over i of exp(lse_i - m) out_i / sum over i of exp(lse_i - m)
 *     lse = m + ln(sum over i of exp(lse_i - m))                 m = max lse_i
 *
 * A part that has no key (log-sum-exp -infinity) has no effect, whatever its
 * output holds; without any other part the output is 0 and the log-sum-exp
 * -infinity. Parts are summed in their order. 'out' may be one of the part_out
 * and 'lse' one of the part_lse; any other overlap is refused.
 *
 * Error, for parts that are exact: each weight is off by a factor of at most
 * 1 + 2^-24 (4 + |lse_i - m|), and the sums by (parts + 2) 2^-24 of the sum of
 * the weighted magnitudes. A log-sum-exp that is rounded to f32 is itself off
 * by 2^-24 |lse_i|, which moves the weights as much.
 * Returns QKV_OK, or QKV_E_NULL / _SIZE / _FLAGS / _SHAPE / _STRIDE / _ALIGN
 * / _OVERLAP / _OVERFLOW, in which case nothing is written. Since 0.1.
 */
QKV_API qkv_status qkv_merge(const qkv_merge_desc *desc);

/* ------------------------------------------------------- filling a cache */

enum {
    /* The rotary embedding turns neighbours, x[2i] and x[2i + 1], instead of
     * x[i] and x[i + rotary_dim / 2]. */
    QKV_ROTARY_NEIGHBOURS = 64
};

/*
 * New rows for a key/value cache. The cache's fields are those of
 * qkv_attention_desc, so that the one's can be copied to the other.
 */
typedef struct qkv_kv_append_desc {
    size_t size;       /* sizeof(qkv_kv_append_desc) */
    int32_t flags;     /* QKV_ROTARY_NEIGHBOURS */
    int32_t reserved;  /* 0 */
    int64_t batch;     /* 0: 1 */
    int64_t kv_heads;  /* 0: 1 */
    int64_t new_len;   /* new rows a sequence; with 0 nothing is written */
    int64_t kv_len;    /* rows that a sequence has room for */
    int64_t head_dim;  /* elements of a key, from 1 on */
    int64_t value_dim; /* elements of a value; 0: head_dim */

    /* The new rows, [batch][kv_heads][new_len][head_dim or value_dim], f32, f16
     * or bf16. One of the two may have data NULL: then only the other's cache
     * is written. */
    qkv_tensor new_key, new_value;

    /*
     * Ragged batches. With 'new_starts' ([batch + 1], not falling) new_key and
     * new_value have no batch axis: sequence b owns their rows new_starts[b] ..
     * new_starts[b + 1] - 1 of new_len.
     */
    const int64_t *new_starts;

    /* Where the first new row of each sequence goes, [batch]: its length so
     * far. NULL: 0. */
    const int64_t *positions;

    /* The cache, of any type up to QKV_Q4_0: [batch][kv_heads][kv_len][dim], or
     * with a page_size pools of pages, as in qkv_attention_desc. */
    qkv_tensor key, value;
    qkv_tensor key_scale, value_scale; /* of QKV_I8, f32 */
    int64_t page_size, pages, page_table_stride;
    const int32_t *page_table;

    /*
     * Rotary position embedding of the first rotary_dim elements (an even
     * number) of the new keys, before they are narrowed: the pair (a, b) of
     * number i at position p becomes (a c - b s, a s + b c), with c = cosines[p
     * * rotary_stride + i] and s = sines[...]; the tables have rotary_len rows
     * of rotary_dim / 2 elements. 0: none.
     */
    int64_t rotary_dim, rotary_len;
    int64_t rotary_stride; /* 0: rotary_dim / 2 */
    const float *cosines, *sines;
} qkv_kv_append_desc;

/*
 * qkv_kv_append() writes rows into a cache. Every row is converted by itself,
 * with the same bits on every ISA (rounding to nearest, denormals not
 * flushed; of a NaN only that it is one):
 *
 * - f16, bf16: rounded once, to nearest, ties to even, overflowing to
 *   infinity.
 * - 8-bit floats likewise, but what lies beyond the largest number, infinity
 *   too, becomes that number.
 * - QKV_Q8_0 (a block), QKV_I8 (a row): with d = max|x| / 127, the integers
 *   are x * (1 / d) rounded to nearest, ties to even, and the scale is d,
 *   rounded to f16 for QKV_Q8_0.
 * - QKV_Q4_0: with d = m / -8, m being the first element of largest magnitude,
 *   the nibbles are min(15, floor(x * (1 / d) + 8.5)) and the scale is d
 *   rounded to f16, as GGUF files have it.
 *
 * A scale beyond 65504 becomes that, with integers at their limits; where |d|
 * < 2^-126 the integers stand for 0, and the scale of QKV_I8 is 0. A NaN or an
 * infinity makes all of its block (QKV_I8: its row) NaN.
 *
 * No row of the cache but the new ones' is read or written. Rows of different
 * sequences must not be the same memory. Calls for different rows may run at
 * the same time. Where the source is not f32, or keys are rotated, head_dim
 * and value_dim are at most 4096.
 *
 * Returns QKV_OK, or QKV_E_NULL / _SIZE / _FLAGS / _SHAPE (new rows that do not
 * fit kv_len or rotary_len, too) / _STRIDE / _DTYPE / _ALIGN / _OVERLAP /
 * _OVERFLOW / _INDEX (an entry of the page table that new rows need) /
 * _UNSUPPORTED, in which case nothing is written. Since 0.1.
 */
QKV_API qkv_status qkv_kv_append(const qkv_kv_append_desc *desc);

/* ----------------------------------------------------- projection, layer */

enum {
    /*
     * Weight matrices are stored [out][in], as the linear layers of most
     * frameworks are, instead of [in][out].
     */
    QKV_WEIGHT_OUT_IN = 4
};

/*
 * A weight matrix W with an optional bias: y = x W + bias. W has 'in' rows
 * of 'out' elements (with QKV_WEIGHT_OUT_IN 'out' rows of 'in' elements),
 * 'stride' elements apart; 0 means packed.
 */
typedef struct qkv_linear {
    const void *weight;
    int64_t stride;
    const float *bias; /* 'out' elements, or NULL */
    int32_t dtype;     /* of 'weight': QKV_F32, QKV_F16 or QKV_BF16 */
    int32_t reserved;  /* 0 */
} qkv_linear;

/*
 * One projection: for every row x_i of 'input' and every head h
 *
 *     out(h, i) = x_i W[:, h * head_dim .. (h + 1) * head_dim - 1] + bias[h * head_dim ..]
 *
 * With heads = 1 this is a plain matrix product with bias.
 */
typedef struct qkv_project_desc {
    size_t size;   /* sizeof(qkv_project_desc) */
    int32_t flags; /* QKV_WEIGHT_OUT_IN */
    int32_t reserved;
    int64_t batch;    /* 0: 1 */
    int64_t rows;     /* rows of input a batch; with 0 nothing is written */
    int64_t in_dim;   /* elements of an input row, from 1 on */
    int64_t heads;    /* 0: 1 */
    int64_t head_dim; /* elements of an output row and head, from 1 on */
    qkv_tensor input; /* [batch][rows][in_dim]; stride_head is ignored */
    qkv_linear linear;
    qkv_tensor out; /* [batch][heads][rows][head_dim] */
} qkv_project_desc;

/*
 * qkv_project() computes a projection; qkv_project_scratch_size() tells the
 * scratch memory it needs, which does not grow with the sizes without
 * bound. 'out' and 'scratch' overlap nothing.
 *
 * The bits of an output row depend on its input row, in_dim, the weights, the
 * bias and the ISA, and on nothing else: not on how many rows there are.
 * Error: |out - exact| <= (n + 2) 2^-24 (sum |x_d w_d| + |bias|) with
 * n = in_dim (beyond 4096 summed in blocks, as in qkv_dot()); an output of 16
 * bits is that, rounded once.
 * Returns QKV_OK, or QKV_E_NULL / _SIZE / _FLAGS / _SHAPE / _STRIDE / _DTYPE
 * / _ALIGN / _OVERLAP / _OVERFLOW / _SCRATCH / _UNSUPPORTED, in which case
 * nothing is written. Since 0.1.
 */
QKV_API qkv_status qkv_project_scratch_size(const qkv_project_desc *desc, size_t *bytes);
QKV_API qkv_status qkv_project(const qkv_project_desc *desc, void *scratch, size_t scratch_size);

/*
 * A whole self-attention layer. For the rows x_i of one sequence:
 *
 *     q_i = x_i Wq + bq,  k_i = x_i Wk + bk,  v_i = x_i Wv + bv   (split into heads)
 *     c_i = the heads' attention outputs, joined                  (q_heads * value_dim)
 *     out_i = c_i Wo + bo, or c_i itself where Wo is not given
 */
typedef struct qkv_self_attention_desc {
    size_t size;   /* sizeof(qkv_self_attention_desc) */
    int32_t flags; /* QKV_CAUSAL, QKV_SCALE_SET, QKV_WEIGHT_OUT_IN */
    float scale;   /* as in qkv_attention_desc */

    int64_t batch;     /* 0: 1 */
    int64_t seq_len;   /* rows of a sequence; with 0 nothing is written */
    int64_t model_dim; /* elements of an input row, from 1 on */
    int64_t q_heads;   /* 0: 1 */
    int64_t kv_heads;  /* 0: q_heads */
    int64_t head_dim;  /* of a query and a key, from 1 on */
    int64_t value_dim; /* 0: head_dim */
    int64_t out_dim;   /* of Wo; 0: model_dim. Ignored without Wo */

    qkv_tensor input; /* [batch][seq_len][model_dim]; stride_head is ignored */
    qkv_linear wq;    /* [model_dim][q_heads * head_dim] */
    qkv_linear wk;    /* [model_dim][kv_heads * head_dim] */
    qkv_linear wv;    /* [model_dim][kv_heads * value_dim] */
    qkv_linear wo;    /* [q_heads * value_dim][out_dim], optional: weight NULL */
    qkv_tensor out;   /* [batch][seq_len][out_dim], or [..][q_heads * value_dim] without Wo */
    qkv_tensor lse;   /* optional, as in qkv_attention_desc */
} qkv_self_attention_desc;

/*
 * qkv_self_attention() computes the layer. Its scratch memory holds the
 * queries, keys, values and joined heads of one sequence as f32, so it grows
 * with seq_len (not with batch). 'out' may not overlap an input. Of 'input',
 * the weights and 'out' each may have a type of its own; only 'out' is rounded
 * to it.
 * Errors as in qkv_project() and qkv_attention(). Since 0.1.
 */
QKV_API qkv_status qkv_self_attention_scratch_size(const qkv_self_attention_desc *desc,
                                                   size_t *bytes);
QKV_API qkv_status qkv_self_attention(const qkv_self_attention_desc *desc, void *scratch,
                                      size_t scratch_size);

#ifdef __cplusplus
}
#endif

#endif
