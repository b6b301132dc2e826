/* SPDX-License-Identifier: MIT */
/*
 * Problems that PyTorch has computed: tests/data/sdpa. Its f32 outputs are
 * within 5.3e-7 of its own f64 ones (data/README.md), and the library within
 * its bound of the exact result, so the two differ by no more than the sum.
 * The log-sum-exp was computed in f64 and rounded to f32.
 */
#include "problem.h"

#include <criterion/parameterized.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "npy.h"

enum { CASES = 36 };

typedef struct recorded_case {
    int batch, heads, kv_heads, q_len, kv_len, head_dim, value_dim, causal;
    char scale[32], note[128];
} recorded_case;

static const char *data_folder(void)
{
    const char *folder = getenv("QKV_DATA");
    return folder ? folder : TEST_DATA;
}

static struct npy load(int id, const char *what)
{
    char path[512], error[256];
    struct npy array;
    snprintf(path, sizeof path, "%s/sdpa/case_%02d_%s.npy", data_folder(), id, what);
    if (npy_load(path, &array, error, sizeof error))
        fail_with("%s: %s", path, error);
    return array;
}

static recorded_case find_case(int wanted)
{
    char path[512], line[512];
    snprintf(path, sizeof path, "%s/sdpa/cases.csv", data_folder());
    FILE *file = fopen(path, "r");
    if (!file)
        fail_with("cannot read %s", path);
    while (fgets(line, sizeof line, file)) {
        recorded_case c;
        int id;
        if (sscanf(line, "%d,%d,%d,%d,%d,%d,%d,%d,%d,%31[^,],%127[^\n]", &id, &c.batch, &c.heads,
                   &c.kv_heads, &c.q_len, &c.kv_len, &c.head_dim, &c.value_dim, &c.causal, c.scale,
                   c.note) == 11 &&
            id == wanted) {
            fclose(file);
            return c;
        }
    }
    fail_with("%s has no case %d", path, wanted);
    abort();
}

static void copy(const tensor *t, const struct npy *from)
{
    if (t->extent != from->count)
        fail_with("the file has %lld elements", (long long)from->count);
    memcpy(t->data, from->data, (size_t)from->count * sizeof *from->data);
}

static void widen(double *bound, int64_t n, double more)
{
    for (int64_t i = 0; i < n; i++)
        bound[i] += more;
}

static void compare(problem *p, int id, const recorded_case *c)
{
    struct npy out = load(id, "o"), lse = load(id, "lse");
    const int64_t rows = (int64_t)c->batch * c->heads * c->q_len;
    double *o_bound = doubles(SLOTS - 1, out.count), *l_bound = doubles(SLOTS - 2, rows);
    double *exact = doubles(SLOTS - 3, out.count), *exact_lse = doubles(SLOTS - 4, rows);
    const oracle_attention o = {.batch = c->batch,
                                .q_heads = c->heads,
                                .kv_heads = c->kv_heads,
                                .q_len = c->q_len,
                                .kv_len = c->kv_len,
                                .head_dim = c->head_dim,
                                .value_dim = c->value_dim,
                                .causal = c->causal,
                                .scale = p->s.scale_set ? (double)p->s.scale
                                                        : 1.0 / sqrt((double)c->head_dim),
                                .q = tensor_doubles(&p->query, SLOTS - 5),
                                .k = tensor_doubles(&p->key, SLOTS - 6),
                                .v = tensor_doubles(&p->value, SLOTS - 7),
                                .out = exact,
                                .out_bound = o_bound,
                                .lse = exact_lse,
                                .lse_bound = l_bound};
    oracle_attention_run(&o);
    widen(o_bound, out.count, 5.3e-7);
    for (int64_t i = 0; i < rows; i++)
        l_bound[i] += ORACLE_U * fabs(exact_lse[i]);

    /* The file against the oracle, then the library against the file. */
    expect_close("PyTorch's output", out.data, exact, o_bound, out.count);
    for (int64_t i = 0; i < out.count; i++)
        exact[i] = (double)out.data[i];
    for (int64_t i = 0; i < rows; i++)
        exact_lse[i] = (double)lse.data[i];
    for_each_isa(isa)
    {
        problem_reset(p);
        cr_assert_eq(problem_run(p), QKV_OK);
        guards_intact();
        context("case %d (%s) on %s", id, c->note, qkv_isa_name());
        expect_close("out", p->out.data, exact, o_bound, out.count);
        expect_close("lse", p->lse.data, exact_lse, l_bound, rows);
        tally(isa, 1);
    }
    npy_free(&out);
    npy_free(&lse);
}

Test(recorded, pytorch)
{
    for (int id = 0; id < CASES; id++) {
        context("case %d", id);
        const recorded_case c = find_case(id);
        shape s = {.batch = c.batch,
                   .q_heads = c.heads,
                   .kv_heads = c.kv_heads,
                   .q_len = c.q_len,
                   .kv_len = c.kv_len,
                   .head_dim = c.head_dim,
                   .value_dim = c.value_dim,
                   .causal = c.causal};
        if (strcmp(c.scale, "default") != 0) {
            s.scale_set = true;
            s.scale = strtof(c.scale, NULL);
        }
        problem p = problem_make(s, NULL);
        const char *names[] = {"q", "k", "v"};
        const tensor *tensors[] = {&p.query, &p.key, &p.value};
        for (int i = 0; i < 3; i++) {
            struct npy array = load(id, names[i]);
            copy(tensors[i], &array);
            npy_free(&array);
        }
        compare(&p, id, &c);
    }
}
