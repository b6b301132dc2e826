/* SPDX-License-Identifier: MIT */
/*
 * The layer in f64, written as its formulas read, and from its intermediate
 * values a tolerance for every number that two f32 implementations compute.
 *
 * Rounding errors. An f32 operation has the relative error d, |d| <= u = 2^-24.
 * The bounds that hold for certain add up the worst case of every operation;
 * through a projection, a dot product, a softmax, a weighted sum and another
 * projection they reach 0.05, far too much to notice a mistake. So the errors
 * are taken as what they are in practice, independent and of mean 0 (Higham
 * and Mary, "A New Approach to Probabilistic Rounding Error Analysis", SIAM J.
 * Sci. Comput. 41, 2019). A number of at most u, of mean 0, is sub-Gaussian
 * with the parameter s = u (Hoeffding). Parameters of independent errors add
 * as squares, of dependent ones as they are, and an error exceeds L s with a
 * probability of at most 2 exp(-L^2 / 2).
 *
 * To first order in u, with hats left out, T tokens, n = hidden, h = head_dim:
 *
 *   projection   s(q)^2 = (n + 1) u^2 (sum |x w| + |b|)^2          n products and the sums
 *   logit        l_ij = scale q_i . k_j has two parts:
 *                a_ij^2 = scale^2 sum_d s(q_id)^2 k_jd^2           common to the whole row i
 *                b_ij^2 = scale^2 sum_d q_id^2 s(k_jd)^2           one for every key
 *                         + (h + 2) u^2 (scale sum |q k|)^2        the dot product itself
 *                         + (4 u)^2                                exp: 1 ulp, its argument's
 * rounding weight       dw_j = w_j (dl_j - sum_k w_k dl_k), so s(w_j) = w_j ((1 - 2 w_j) a_j +
 * sum_k w_k a_k
 *                         + sqrt((1 - 2 w_j) b_j^2 + sum_k w_k^2 b_k^2 + (T + 4) u^2))
 *   context      dc = sum_j w_j (dl_j (v_j - c) + dv_j), so
 *                s(c) = sum_j w_j a_j |v_j - c| + sqrt(sum_j w_j^2 b_j^2 (v_j - c)^2
 *                       + sum_j w_j^2 s(v_j)^2 + (T + 4) u^2 (sum_j w_j |v_j|)^2)
 *   out          columns of one head share q and k and so depend on each other:
 *                s(o)^2 = sum over heads (sum_{d in head} s(c_d) |w_d|)^2
 *                         + (n + 1) u^2 (sum |c w| + |b|)^2
 *
 * The tolerance is 8 sqrt(2) s: sqrt(2) because both results have errors, and
 * 8 so that among a million numbers that only just meet these assumptions one
 * exceeds it by chance with a probability of 3e-8.
 */
#include "layer.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

static const double unit = 0x1p-24;

static double tolerance_of(double parameter)
{
    return 8.0 * sqrt(2.0) * parameter;
}

/* y = x W + b for f32 weights, and s(y) if 'parameter' is not NULL. */
static void project(const double *x, const struct npy *w, const struct npy *b, int64_t tokens,
                    int64_t n, double *y, double *parameter)
{
    for (int64_t i = 0; i < tokens; i++) {
        double *row = y + i * n, *sizes = parameter + i * n;
        for (int64_t c = 0; c < n; c++) {
            row[c] = (double)b->data[c];
            sizes[c] = fabs(row[c]);
        }
        for (int64_t k = 0; k < n; k++) {
            const float *w_row = w->data + k * n;
            for (int64_t c = 0; c < n; c++) {
                const double term = x[i * n + k] * (double)w_row[c];
                row[c] += term;
                sizes[c] += fabs(term);
            }
        }
        for (int64_t c = 0; c < n; c++)
            sizes[c] *= sqrt((double)(n + 1)) * unit;
    }
}

/* Q, K and V of the whole layer and their parameters, and one row's work. */
struct work {
    int64_t tokens, hidden, head_dim;
    double *y[3], *s[3];
    double *x;
    double *w, *a, *b2; /* of one query: weights, a_j and b_j^2 */
    double *shared;     /* of one head: sum_{d in head} s(c_d) |w_d| for one token */
};

/* One query of one head: logits, their parameters, weights. */
static void attend_row(struct work *k, int64_t i, int64_t column)
{
    const double scale = 1.0 / sqrt((double)k->head_dim);
    double max = -HUGE_VAL, sum = 0.0;

    for (int64_t j = 0; j < k->tokens; j++) {
        double dot = 0.0, size = 0.0, from_q = 0.0, from_k = 0.0;
        for (int64_t d = column; d < column + k->head_dim; d++) {
            const int64_t iq = i * k->hidden + d, jk = j * k->hidden + d;
            const double q = k->y[LAYER_Q][iq], key = k->y[LAYER_K][jk];
            const double dq = k->s[LAYER_Q][iq] * key, dk = q * k->s[LAYER_K][jk];
            dot += q * key;
            size += fabs(q * key);
            from_q += dq * dq;
            from_k += dk * dk;
        }
        const double rounding = unit * scale * size;
        k->w[j] = scale * dot;
        k->a[j] = scale * sqrt(from_q);
        k->b2[j] = scale * scale * from_k + (double)(k->head_dim + 2) * rounding * rounding +
                   16.0 * unit * unit;
        max = fmax(max, k->w[j]);
    }
    for (int64_t j = 0; j < k->tokens; j++)
        sum += k->w[j] = exp(k->w[j] - max);
    for (int64_t j = 0; j < k->tokens; j++)
        k->w[j] /= sum;
}

static void weights_row(const struct work *k, double *weights, double *tolerance)
{
    double sum_a = 0.0, sum_b2 = 0.0;
    for (int64_t j = 0; j < k->tokens; j++) {
        sum_a += k->w[j] * k->a[j];
        sum_b2 += k->w[j] * k->w[j] * k->b2[j];
    }
    const double sums = (double)(k->tokens + 4) * unit * unit;
    for (int64_t j = 0; j < k->tokens; j++) {
        const double w = k->w[j], rest = 1.0 - 2.0 * w;
        weights[j] = w;
        tolerance[j] =
            tolerance_of(w * (rest * k->a[j] + sum_a + sqrt(rest * k->b2[j] + sum_b2 + sums)));
    }
}

/* Stores s(c), not yet a tolerance, in 'parameter'. */
static void context_row(const struct work *k, int64_t column, double *context, double *parameter)
{
    const double *values = k->y[LAYER_V] + column, *errors = k->s[LAYER_V] + column;
    const double sums = (double)(k->tokens + 4) * unit * unit;

    for (int64_t d = 0; d < k->head_dim; d++) {
        double c = 0.0, size = 0.0, dependent = 0.0, squares = 0.0;
        for (int64_t j = 0; j < k->tokens; j++) {
            c += k->w[j] * values[j * k->hidden + d];
            size += k->w[j] * fabs(values[j * k->hidden + d]);
        }
        for (int64_t j = 0; j < k->tokens; j++) {
            const double off = k->w[j] * fabs(values[j * k->hidden + d] - c);
            const double own = k->w[j] * errors[j * k->hidden + d];
            dependent += off * k->a[j];
            squares += off * off * k->b2[j] + own * own;
        }
        context[d] = c;
        parameter[d] = dependent + sqrt(squares + sums * size * size);
    }
}

/* Turns s(out) of the last rounding, already there, into the tolerance. */
static void out_tolerance(struct work *k, const struct layer_data *data,
                          const double *context_parameter, double *out)
{
    const int64_t n = k->hidden;
    for (int64_t i = 0; i < k->tokens; i++) {
        double *row = out + i * n;
        for (int64_t c = 0; c < n; c++)
            row[c] *= row[c];
        for (int64_t h = 0; h < data->heads; h++) {
            memset(k->shared, 0, (size_t)n * sizeof *k->shared);
            for (int64_t d = h * k->head_dim; d < (h + 1) * k->head_dim; d++)
                for (int64_t c = 0; c < n; c++)
                    k->shared[c] += context_parameter[i * n + d] *
                                    fabs((double)data->w[LAYER_O].data[d * n + c]);
            for (int64_t c = 0; c < n; c++)
                row[c] += k->shared[c] * k->shared[c];
        }
        for (int64_t c = 0; c < n; c++)
            row[c] = tolerance_of(sqrt(row[c]));
    }
}

static void compute(const struct layer_data *data, struct work *k, struct layer_reference *r)
{
    const int64_t n = k->hidden, tokens = k->tokens;
    for (int64_t e = 0; e < tokens * n; e++)
        k->x[e] = (double)data->x.data[e];
    for (int m = LAYER_Q; m <= LAYER_V; m++)
        project(k->x, &data->w[m], &data->b[m], tokens, n, k->y[m], k->s[m]);

    for (int64_t h = 0; h < data->heads; h++) {
        for (int64_t i = 0; i < tokens; i++) {
            const int64_t row = (h * tokens + i) * tokens;
            const int64_t at = i * n + h * k->head_dim;
            attend_row(k, i, h * k->head_dim);
            weights_row(k, r->weights + row, r->weights_tolerance + row);
            context_row(k, h * k->head_dim, r->context + at, r->context_tolerance + at);
        }
    }
    project(r->context, &data->w[LAYER_O], &data->b[LAYER_O], tokens, n, r->out, r->out_tolerance);
    out_tolerance(k, data, r->context_tolerance, r->out_tolerance);
    for (int64_t e = 0; e < tokens * n; e++)
        r->context_tolerance[e] = tolerance_of(r->context_tolerance[e]);

    /* Recorded weights that were stored as f16 are rounded once more: half a
     * unit in the last place, which is 2^-11 relative or 2^-25 (subnormal). */
    if (data->weights.element_size == 2)
        for (int64_t e = 0; e < data->weights.count; e++)
            r->weights_tolerance[e] += fmax(r->weights[e] * 0x1p-11, 0x1p-25);
}

int layer_reference(const struct layer_data *data, struct layer_reference *reference)
{
    const int64_t rows = data->tokens * data->hidden, square = data->weights.count;
    struct work work = {.tokens = data->tokens, .hidden = data->hidden, .head_dim = data->head_dim};
    *reference = (struct layer_reference){0};

    struct {
        double **array;
        int64_t count;
    } const arrays[] = {
        {&work.y[0], rows},
        {&work.y[1], rows},
        {&work.y[2], rows},
        {&work.s[0], rows},
        {&work.s[1], rows},
        {&work.s[2], rows},
        {&work.x, rows},
        {&work.w, data->tokens},
        {&work.a, data->tokens},
        {&work.b2, data->tokens},
        {&work.shared, data->hidden},
        {&reference->context, rows},
        {&reference->out, rows},
        {&reference->weights, square},
        {&reference->context_tolerance, rows},
        {&reference->out_tolerance, rows},
        {&reference->weights_tolerance, square},
    };
    enum { ARRAYS = sizeof arrays / sizeof *arrays, OWN = 11 };
    bool complete = true;
    for (int i = 0; i < ARRAYS && complete; i++)
        complete = (*arrays[i].array = tool_alloc(arrays[i].count, sizeof(double))) != NULL;
    if (complete)
        compute(data, &work, reference);
    for (int i = 0; i < OWN; i++)
        free(*arrays[i].array);
    if (!complete)
        layer_reference_free(reference);
    return complete ? TOOL_OK : TOOL_ERROR;
}

void layer_reference_free(struct layer_reference *reference)
{
    free(reference->context);
    free(reference->out);
    free(reference->weights);
    free(reference->context_tolerance);
    free(reference->out_tolerance);
    free(reference->weights_tolerance);
    *reference = (struct layer_reference){0};
}
