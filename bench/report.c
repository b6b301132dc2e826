/* SPDX-License-Identifier: MIT */
#define _POSIX_C_SOURCE 200809L
#include "report.h"

#include <math.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

static void read_cpu_name(char *name, size_t size)
{
    char line[256];
    FILE *info = fopen("/proc/cpuinfo", "r");
    snprintf(name, size, "unknown");
    while (info && fgets(line, sizeof line, info)) {
        char *colon = strchr(line, ':');
        if (!colon || (strncmp(line, "model name", 10) != 0 && strncmp(line, "CPU part", 8) != 0))
            continue;
        colon[1 + strcspn(colon + 1, "\n")] = '\0';
        snprintf(name, size, "%s", colon + 1 + strspn(colon + 1, " \t"));
        break;
    }
    if (info)
        fclose(info);
}

const char *bench_cpu_name(void)
{
    static char name[128];
    if (!name[0])
        read_cpu_name(name, sizeof name);
    return name;
}

/* ------------------------------------------------------------------- table */

static const char *time_text(char text[16], double ns)
{
    if (ns < 1e3)
        snprintf(text, 16, "%.1f ns", ns);
    else if (ns < 1e6)
        snprintf(text, 16, "%.4g us", ns / 1e3);
    else if (ns < 1e9)
        snprintf(text, 16, "%.4g ms", ns / 1e6);
    else
        snprintf(text, 16, "%.4g s", ns / 1e9);
    return text;
}

/* In the unit of the limit. */
static const char *rate_text(char text[16], const bench_result *r)
{
    if (strcmp(r->limit, "read") == 0 || strcmp(r->limit, "copy") == 0)
        snprintf(text, 16, "%.1f GB/s", r->gbps);
    else if (!isnan(r->gflops))
        snprintf(text, 16, "%.1f GF/s", r->gflops);
    else
        snprintf(text, 16, "%.2f Ge/s", r->gelems);
    return text;
}

static const char *limit_text(char text[16], const bench_result *r)
{
    if (isnan(r->limit_rate))
        return "none";
    snprintf(text, 16, "%s %.1f", r->limit, r->limit_rate);
    return text;
}

static const char *optional(char text[16], const char *format, double value)
{
    if (isnan(value))
        return "-";
#if defined(__GNUC__)
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wformat-nonliteral"
#endif
    snprintf(text, 16, format, value);
#if defined(__GNUC__)
#pragma GCC diagnostic pop
#endif
    return text;
}

void bench_print_head(const char *dtype, int threads, int rounds, bool cpu_clock)
{
    printf("qkv %d.%d.%d, %s, %s, %d thread%s, %d rounds, %s time; limits measured in turns\n",
           QKV_VERSION_MAJOR, QKV_VERSION_MINOR, QKV_VERSION_PATCH, dtype, bench_cpu_name(),
           threads, threads == 1 ? "" : "s", rounds, cpu_clock ? "cpu" : "wall");
    puts("GF/s: 10^9 useful operations, Ge/s: 10^9 elements, GB/s: 10^9 bytes read (and written), "
         "a second\n");
    printf("%-18s %-12s %-6s %9s %9s %11s %11s %7s %8s\n", "kernel", "shape", "isa", "median",
           "min", "rate", "limit", "of it", "error");
}

void bench_print_row(const bench_result *r)
{
    char t[6][16];
    printf("%-18s %-12s %-6s %9s %9s %11s %11s %7s %8s\n", r->kernel, r->shape, r->isa,
           time_text(t[0], r->median_ns), time_text(t[1], r->min_ns), rate_text(t[2], r),
           limit_text(t[3], r), optional(t[4], "%.1f %%", 100.0 * r->fraction),
           optional(t[5], "%.1e", r->max_error));
    fflush(stdout);
}

void bench_print_prefill_head(void)
{
    printf("\n%-22s %-20s %-6s %-4s %7s %8s %7s %9s %8s\n", "shape", "kernel", "isa", "limit",
           "bar", "figure", "ratio", "GFLOP/s", "error");
}

void bench_print_prefill_row(const bench_result *r, double bar)
{
    char t[5][16];
    printf("%-22s %-20s %-6s %-5s %6s %8s %7s %9s %8s\n", r->shape, r->kernel, r->isa, r->limit,
           optional(t[0], "%.0f %%", 100.0 * bar), optional(t[1], "%.1f %%", 100.0 * r->fraction),
           optional(t[2], "%.3f", r->fraction / bar), optional(t[3], "%.1f", r->gflops),
           optional(t[4], "%.1e", r->max_error));
    fflush(stdout);
}

void bench_print_speedup_head(int threads)
{
    printf("\n%d threads beside one\n%-22s %-6s %9s %-5s %8s %8s %7s %8s %7s %8s\n", threads,
           "shape", "isa", "median", "limit", "speed-up", "limit's", "bar", "figure", "ratio",
           "error");
}

void bench_print_speedup_row(const bench_result *r, double bar)
{
    char t[7][16];
    printf("%-22s %-6s %9s %-5s %8s %8s %7s %8s %7s %8s\n", r->shape, r->isa,
           time_text(t[0], r->median_ns), r->limit, optional(t[1], "%.2f", r->speedup),
           optional(t[2], "%.2f", r->speedup_limit), optional(t[3], "%.0f %%", 100.0 * bar),
           optional(t[4], "%.1f %%", 100.0 * r->fraction),
           optional(t[5], "%.3f", r->fraction / bar), optional(t[6], "%.1e", r->max_error));
    fflush(stdout);
}

/* -------------------------------------------------------------------- JSON */

static void json_text(const char *key, const char *value)
{
    printf("\"%s\": \"", key);
    for (; *value; value++) {
        if (*value == '"' || *value == '\\')
            putchar('\\');
        if ((unsigned char)*value >= ' ')
            putchar(*value);
    }
    fputs("\", ", stdout);
}

static void json_number(const char *key, double value, const char *end)
{
    if (isfinite(value))
        printf("\"%s\": %.6g%s", key, value, end);
    else
        printf("\"%s\": null%s", key, end);
}

void bench_print_json(const bench_result *r, double bar)
{
    char version[32];
    snprintf(version, sizeof version, "%d.%d.%d", QKV_VERSION_MAJOR, QKV_VERSION_MINOR,
             QKV_VERSION_PATCH);
    putchar('{');
    json_text("kernel", r->kernel);
    json_text("shape", r->shape);
    json_text("isa", r->isa);
    json_text("dtype", r->dtype);
    printf("\"threads\": %d, \"rounds\": %d, ", r->threads, r->rounds);
    printf("\"alone\": %s, ", r->alone ? "true" : "false");
    json_number("median_ns", r->median_ns, ", ");
    json_number("min_ns", r->min_ns, ", ");
    json_number("gflops", r->gflops, ", ");
    json_number("gbps", r->gbps, ", ");
    json_number("gelems", r->gelems, ", ");
    json_text("limit", r->limit);
    json_number("limit_rate", r->limit_rate, ", ");
    json_number("fraction", r->fraction, ", ");
    json_number("max_error", r->max_error, ", ");
    if (!isnan(r->speedup)) {
        json_number("speedup", r->speedup, ", ");
        json_number("speedup_limit", r->speedup_limit, ", ");
    }
    if (!isnan(bar))
        json_number("bar", bar, ", ");
    json_text("version", version);
    json_text("cpu", bench_cpu_name());
    printf("\"qkv_version\": %d}\n", qkv_version());
    fflush(stdout);
}

/* ---------------------------------------------------------------- progress */

enum { BAR = 24 };

void bench_progress(int done, int all, const char *what)
{
    if (!isatty(STDERR_FILENO) || all < 1)
        return;
    char bar[BAR + 1];
    for (int i = 0; i < BAR; i++)
        bar[i] = i < BAR * done / all ? '#' : '.';
    bar[BAR] = '\0';
    fprintf(stderr, "\r\033[K[%s] %d/%d %s", bar, done, all, what);
    fflush(stderr);
}

void bench_progress_erase(void)
{
    if (isatty(STDERR_FILENO)) {
        fputs("\r\033[K", stderr);
        fflush(stderr);
    }
}
