/* SPDX-License-Identifier: MIT */
/*
 * The oracle: what the library must compute, in plain f64 loops, and how far
 * it may be off, computed from the same inputs. It shares no code with the
 * library, not even its headers. The oracle's own rounding, about n 2^-53,
 * is 2^29 times smaller than the bounds and is left out of them.
 *
 * The bounds are those of the public header, u = 2^-24, completed by what a
 * bound relative to the inputs leaves out: each product may lose half the
 * smallest denormal, and an exponential below the normal range may be 0.
 */
#ifndef ORACLE_H
#define ORACLE_H

#include <stdint.h>

/*
 * The arithmetic that the code under test has: 'u' is the largest relative
 * error of an operation, 'tiny' what one may lose beside that where it
 * underflows. Both are those of the default mode, 2^-24 and 2^-150, unless a
 * test that runs kernels in another sets them. A directed rounding errs by up
 * to a whole unit in the last place instead of half of one, which doubles
 * both; where denormals are flushed, a product and the sum it enters may each
 * lose what is below the smallest normal number.
 */
typedef struct oracle_arithmetic {
    double u, tiny;
} oracle_arithmetic;
extern oracle_arithmetic oracle_machine;

#define ORACLE_U oracle_machine.u
#define ORACLE_TINY oracle_machine.tiny

enum { ORACLE_KEY_BLOCK = 512, ORACLE_DOT_BLOCK = 4096 };

/* n of the bound of a dot product of 'terms' terms, summed in blocks. */
double oracle_dot_terms(int64_t terms);

/* sum a_i b_i; '*bound' is its error, '*magnitude' sum |a_i b_i|; both may be NULL. */
double oracle_dot(const float *a, const float *b, int64_t n, double *bound, double *magnitude);

/* Distance from 'exact' to the nearest f32 spacing, in f32 ulp of 'exact'. */
double oracle_ulp_error(float got, double exact);

/*
 * How far an f32 2^x may be from 'exact' if x was off by 'x_error': that, the
 * 1 ulp (at most 2u) of the exponential, and below the normal range all of it.
 */
double oracle_exp2_error(double exact, double x_error);

/*
 * One row: weights, bounds of the weights, log-sum-exp and its bound. The
 * last two may be NULL. A row with a NaN or +inf is all NaN; a row of -inf
 * (or an empty one) is all 0 with the log-sum-exp -inf.
 */
void oracle_softmax(const float *scores, int64_t n, float scale, double *weights, double *bound,
                    double *lse, double *lse_bound);

/* out[d] = sum over j of weights[j] * values[j * stride + d], 0 weights passed over. */
void oracle_weighted_sum(const float *weights, const float *values, int64_t values_stride,
                         int64_t kv_len, int64_t value_dim, double *out, double *bound);

/* An attention problem on packed f64 arrays [batch][heads][rows][dim]. */
typedef struct oracle_attention {
    int64_t batch, q_heads, kv_heads, q_len, kv_len, head_dim, value_dim;
    int causal;
    /* With 'has_offset' query i stands at i + q_offset, else at i + kv_len - q_len. */
    int has_offset;
    int64_t q_offset;
    double scale;
    const double *q, *k, *v;
    /* How far the library's own q, k, v may be off, or NULL: exact inputs. */
    const double *q_error, *k_error, *v_error;
    double *out, *out_bound; /* [batch][q_heads][q_len][value_dim] */
    double *lse, *lse_bound; /* [batch][q_heads][q_len], may be NULL */
} oracle_attention;

void oracle_attention_run(const oracle_attention *a);

/*
 * y = x W + bias of 'rows' rows, W [in][out] in f64; x may carry an error
 * (NULL: none). 'bias' may be NULL.
 */
void oracle_linear(const double *x, const double *x_error, const float *weight, const float *bias,
                   int64_t rows, int64_t in, int64_t out, double *y, double *bound);

#endif
