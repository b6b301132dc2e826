/* SPDX-License-Identifier: MIT */
#include "oracle.h"

#include <math.h>
#include <stdlib.h>

oracle_arithmetic oracle_machine = {.u = 0x1p-24, .tiny = 0x1p-150};

static const double infinity = HUGE_VAL;
static const double not_a_number = (double)NAN;
static const double smallest_normal = 0x1p-126;

/*
 * e^-105 is less than half the smallest denormal: a logit that lies this far
 * below the maximum, errors included, has no weight, however large its error.
 */
static const double negligible = 105;

static double ceil_div(int64_t n, int64_t block)
{
    return (double)((n + block - 1) / block);
}

double oracle_dot_terms(int64_t terms)
{
    const int64_t in_block = terms < ORACLE_DOT_BLOCK ? terms : ORACLE_DOT_BLOCK;
    const double blocks = ceil_div(terms, ORACLE_DOT_BLOCK);
    return (double)in_block + (blocks > 1 ? blocks - 1 : 0);
}

double oracle_dot(const float *a, const float *b, int64_t n, double *bound, double *magnitude)
{
    double sum = 0, absolute = 0;
    for (int64_t i = 0; i < n; i++) {
        const double product = (double)a[i] * (double)b[i];
        sum += product;
        absolute += fabs(product);
    }
    if (bound)
        *bound = (oracle_dot_terms(n) + 2) * ORACLE_U * absolute + (double)n * ORACLE_TINY;
    if (magnitude)
        *magnitude = absolute;
    return sum;
}

double oracle_ulp_error(float got, double exact)
{
    int exponent;
    frexp(exact, &exponent); /* exact = m 2^exponent, 1/2 <= m < 1 */
    if (exponent < -125)
        exponent = -125; /* denormals are spaced like the smallest normals */
    return fabs((double)got - exact) / ldexp(1.0, exponent - 24);
}

double oracle_exp2_error(double exact, double x_error)
{
    const double ln2 = 0x1.62e42fefa39efp-1;
    if (exact == 0)
        return 0;
    const double relative = expm1(ln2 * x_error) * (1 + 2 * ORACLE_U) + 2 * ORACLE_U;
    return exact * relative + (exact < smallest_normal * (1 + relative) ? smallest_normal : 0);
}

void oracle_softmax(const float *scores, int64_t n, float scale, double *weights, double *bound,
                    double *lse, double *lse_bound)
{
    double max = -infinity, largest = 0, sum = 0;
    int broken = 0;
    for (int64_t j = 0; j < n; j++) {
        const double s = (double)scores[j] * (double)scale;
        broken |= isnan(s) || s == infinity;
        if (s > max)
            max = s;
    }
    for (int64_t j = 0; j < n && max > -infinity; j++) {
        const double s = (double)scores[j] * (double)scale;
        sum += exp(s - max);
        if (s * (1 - 3 * ORACLE_U) - max > -negligible && fabs(s) > largest)
            largest = fabs(s);
    }

    const double blocks = n ? ceil_div(n, ORACLE_KEY_BLOCK) : 1;
    const double ds = 3 * ORACLE_U * largest;
    const double relative = expm1(2 * ds) + (ceil(log2(blocks)) + 16) * ORACLE_U;
    for (int64_t j = 0; j < n; j++) {
        const double p = max > -infinity ? exp((double)scores[j] * (double)scale - max) : 0;
        weights[j] = broken ? not_a_number : max > -infinity ? p / sum : 0;
        bound[j] = weights[j] == 0 ? 0 : relative * weights[j];
        if (weights[j] < smallest_normal * (1 + relative) || p < smallest_normal * (1 + relative))
            bound[j] += smallest_normal;
    }
    if (lse)
        *lse = broken ? not_a_number : max > -infinity ? max + log(sum) : -infinity;
    if (lse_bound) /* of the logits, of the sum, and of max + ln(sum) itself */
        *lse_bound = ds + (ceil(log2(blocks)) + 16) * ORACLE_U +
                     ORACLE_U * (3 * fabs(max) + fabs(max + log(sum)) + 2 * fabs(log(sum)));
}

void oracle_weighted_sum(const float *weights, const float *values, int64_t values_stride,
                         int64_t kv_len, int64_t value_dim, double *out, double *bound)
{
    const double terms = ORACLE_KEY_BLOCK + ceil_div(kv_len, ORACLE_KEY_BLOCK) + 8;
    for (int64_t d = 0; d < value_dim; d++) {
        double sum = 0, absolute = 0;
        for (int64_t j = 0; j < kv_len; j++) {
            if (weights[j] == 0.0f)
                continue;
            const double product = (double)weights[j] * (double)values[j * values_stride + d];
            sum += product;
            absolute += fabs(product);
        }
        out[d] = sum;
        bound[d] = terms * ORACLE_U * absolute + (double)kv_len * ORACLE_TINY;
    }
}

/* ------------------------------------------------------------- attention */

typedef struct row {
    const double *q, *q_error;
    const double *k, *k_error, *v, *v_error; /* of the row's kv head */
    int64_t visible;
    double *logits, *errors; /* room for kv_len each */
    double *out, *bound, *lse, *lse_bound;
} row;

/* What the logits of one row come to. */
typedef struct row_logits {
    double max, sum, ds;
    int broken; /* a NaN or +inf is among them */
} row_logits;

static double logit(const oracle_attention *a, const row *r, int64_t j, double *error)
{
    double sum = 0, absolute = 0, inherited = 0;
    for (int64_t d = 0; d < a->head_dim; d++) {
        const double q = r->q[d], k = r->k[j * a->head_dim + d];
        const double dq = r->q_error ? r->q_error[d] : 0;
        const double dk = r->k_error ? r->k_error[j * a->head_dim + d] : 0;
        sum += q * k;
        absolute += (fabs(q) + dq) * (fabs(k) + dk);
        inherited += fabs(q) * dk + fabs(k) * dq + dq * dk;
    }
    *error =
        fabs(a->scale) * (inherited + (oracle_dot_terms(a->head_dim) + 2) * ORACLE_U * absolute +
                          (double)a->head_dim * ORACLE_TINY);
    return a->scale * sum;
}

static row_logits row_scan(const oracle_attention *a, const row *r)
{
    row_logits l = {.max = -infinity};
    double max_error = 0;
    for (int64_t j = 0; j < r->visible; j++) {
        const double s = r->logits[j] = logit(a, r, j, &r->errors[j]);
        l.broken |= isnan(s) || s == infinity;
        if (s > l.max) {
            l.max = s;
            max_error = r->errors[j];
        }
    }
    for (int64_t j = 0; j < r->visible; j++)
        if (r->logits[j] + r->errors[j] > l.max - max_error - negligible && r->errors[j] > l.ds)
            l.ds = r->errors[j];
    return l;
}

static void row_values(const oracle_attention *a, const row *r, row_logits *l)
{
    const double terms = ORACLE_KEY_BLOCK + ceil_div(a->kv_len, ORACLE_KEY_BLOCK) + 32;
    const double relative = expm1(2 * l->ds) + terms * ORACLE_U;
    for (int64_t j = 0; j < r->visible; j++) {
        if (r->logits[j] == -infinity)
            continue;
        const double p = exp(r->logits[j] - l->max);
        const double p_error = p == 0 ? 0 : p * relative;
        const double lost = p < smallest_normal * exp(l->ds) ? smallest_normal : ORACLE_TINY;
        l->sum += p;
        for (int64_t d = 0; d < a->value_dim; d++) {
            const double v = r->v[j * a->value_dim + d];
            const double dv = r->v_error ? r->v_error[j * a->value_dim + d] : 0;
            r->out[d] += p * v;
            r->bound[d] += (fabs(v) + dv) * (p_error + lost) + p * dv + ORACLE_TINY;
        }
    }
    for (int64_t d = 0; d < a->value_dim; d++) {
        r->out[d] /= l->sum;
        r->bound[d] = r->bound[d] / l->sum + 2 * ORACLE_TINY;
    }
}

static void row_run(const oracle_attention *a, const row *r)
{
    for (int64_t d = 0; d < a->value_dim; d++)
        r->out[d] = r->bound[d] = 0;
    row_logits l = row_scan(a, r);
    if (l.broken) {
        for (int64_t d = 0; d < a->value_dim; d++)
            r->out[d] = not_a_number;
    } else if (l.max > -infinity) {
        row_values(a, r, &l);
    }
    if (!a->lse)
        return;
    const double lse = l.broken ? not_a_number : l.max > -infinity ? l.max + log(l.sum) : -infinity;
    *r->lse = lse;
    /* Of the logits; of the sum, relative; of max ln(2) + ln(sum) itself. */
    *r->lse_bound = l.ds +
                    (ORACLE_KEY_BLOCK + ceil_div(a->kv_len, ORACLE_KEY_BLOCK) + 16) * ORACLE_U +
                    ORACLE_U * (3 * fabs(l.max) + fabs(lse) + 2 * fabs(log(l.sum)));
}

void oracle_attention_run(const oracle_attention *a)
{
    const int64_t group = a->q_heads / a->kv_heads;
    double *logits = malloc(2 * (size_t)(a->kv_len + 1) * sizeof *logits);
    if (!logits)
        abort();
    for (int64_t b = 0; b < a->batch; b++) {
        for (int64_t h = 0; h < a->q_heads; h++) {
            const int64_t keys = (b * a->kv_heads + h / group) * a->kv_len;
            for (int64_t i = 0; i < a->q_len; i++) {
                const int64_t at = (b * a->q_heads + h) * a->q_len + i;
                const int64_t offset = a->has_offset ? a->q_offset : a->kv_len - a->q_len;
                int64_t visible = a->causal ? i + offset + 1 : a->kv_len;
                if (visible < 0)
                    visible = 0;
                if (visible > a->kv_len)
                    visible = a->kv_len;
                const row r = {
                    .q = a->q + at * a->head_dim,
                    .q_error = a->q_error ? a->q_error + at * a->head_dim : 0,
                    .k = a->k + keys * a->head_dim,
                    .k_error = a->k_error ? a->k_error + keys * a->head_dim : 0,
                    .v = a->v + keys * a->value_dim,
                    .v_error = a->v_error ? a->v_error + keys * a->value_dim : 0,
                    .visible = visible,
                    .logits = logits,
                    .errors = logits + a->kv_len,
                    .out = a->out + at * a->value_dim,
                    .bound = a->out_bound + at * a->value_dim,
                    .lse = a->lse ? a->lse + at : 0,
                    .lse_bound = a->lse ? a->lse_bound + at : 0,
                };
                row_run(a, &r);
            }
        }
    }
    free(logits);
}

/* ------------------------------------------------------------ projection */

void oracle_linear(const double *x, const double *x_error, const float *weight, const float *bias,
                   int64_t rows, int64_t in, int64_t out, double *y, double *bound)
{
    for (int64_t i = 0; i < rows; i++) {
        for (int64_t c = 0; c < out; c++) {
            const double b = bias ? (double)bias[c] : 0;
            double sum = b, absolute = fabs(b), inherited = 0;
            for (int64_t k = 0; k < in; k++) {
                const double w = (double)weight[k * out + c];
                const double dx = x_error ? x_error[i * in + k] : 0;
                sum += x[i * in + k] * w;
                absolute += (fabs(x[i * in + k]) + dx) * fabs(w);
                inherited += dx * fabs(w);
            }
            y[i * out + c] = sum;
            bound[i * out + c] = inherited + (oracle_dot_terms(in) + 2) * ORACLE_U * absolute +
                                 (double)in * ORACLE_TINY;
        }
    }
}
