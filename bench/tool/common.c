/* SPDX-License-Identifier: MIT */
#include "tool.h"

#include <float.h>
#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

int tool_error(const char *format, ...)
{
    va_list arguments;
    va_start(arguments, format);
    fputs("qkv: ", stderr);
    vfprintf(stderr, format, arguments);
    fputc('\n', stderr);
    va_end(arguments);
    return TOOL_ERROR;
}

/* ------------------------------------------------------------------ options */

static int usage_error(const char *usage, const char *message, const char *argument)
{
    fprintf(stderr, "qkv: %s%s\nusage: %s\n", message, argument, usage);
    return TOOL_ERROR;
}

/* The option that 'argument' names, and where its "=value" begins, if any. */
static const struct tool_option *find_option(const char *argument, const char **inline_value,
                                             const struct tool_option *options, size_t count)
{
    const bool is_long = argument[1] == '-';
    const char *name = argument + 1 + is_long;
    const size_t length = is_long ? strcspn(name, "=") : strlen(name);
    *inline_value = name[length] == '=' ? name + length + 1 : NULL;
    for (size_t i = 0; i < count; i++) {
        const size_t option_length = strlen(options[i].name);
        if (option_length == length && memcmp(options[i].name, name, length) == 0 &&
            is_long == (length > 1))
            return options + i;
    }
    return NULL;
}

int tool_options(int argc, char **argv, const struct tool_option *options, size_t option_count,
                 const char **operands, int operand_count, const char *usage)
{
    int found = 0;
    bool only_operands = false;
    for (int i = 1; i < argc; i++) {
        const char *argument = argv[i];
        if (only_operands || argument[0] != '-' || argument[1] == '\0') {
            if (found == operand_count)
                return usage_error(usage, "too many arguments: ", argument);
            operands[found++] = argument;
            continue;
        }
        if (strcmp(argument, "--") == 0) {
            only_operands = true;
            continue;
        }
        const char *value;
        const struct tool_option *option = find_option(argument, &value, options, option_count);
        if (!option)
            return usage_error(usage, "unknown option ", argument);
        if (option->flag) {
            if (value)
                return usage_error(usage, "this option takes no value: ", argument);
            *option->flag = true;
            continue;
        }
        if (!value && ++i < argc)
            value = argv[i];
        if (!value)
            return usage_error(usage, "a value is missing after ", argument);
        *option->value = value;
    }
    if (found < operand_count)
        return usage_error(usage, "arguments are missing", "");
    return TOOL_OK;
}

int tool_parse_float(const char *option, const char *text, float *number)
{
    if (!text)
        return TOOL_OK;
    char *end;
    const double value = strtod(text, &end);
    if (end == text || *end != '\0' || !(fabs(value) <= (double)FLT_MAX))
        return tool_error("%s: '%s' is not a finite number", option, text);
    *number = (float)value;
    return TOOL_OK;
}

int tool_parse_count(const char *option, const char *text, int64_t least, int64_t most,
                     int64_t *number)
{
    if (!text)
        return TOOL_OK;
    char *end;
    const long long value = strtoll(text, &end, 10); /* too large: LLONG_MAX */
    if (end == text || *end != '\0' || value < least || value > most)
        return tool_error("%s: '%s' is not a whole number from %lld to %lld", option, text,
                          (long long)least, (long long)most);
    *number = value;
    return TOOL_OK;
}

int tool_select_isa(const char *name)
{
    if (!name || qkv_isa_select(name) == QKV_OK)
        return TOOL_OK;
    fprintf(stderr,
            "qkv: --isa: '%s' is no instruction set that can be used here; these can:", name);
    qkv_isa_info info;
    for (int32_t i = 0; qkv_isa_get(i, &info) == QKV_OK; i++)
        if (info.compiled && info.supported)
            fprintf(stderr, " %s", info.name);
    fputc('\n', stderr);
    return TOOL_ERROR;
}

/* ----------------------------------------------------------- files, memory */

int tool_load(const char *path, struct npy *array)
{
    char error[256];
    if (npy_load(path, array, error, sizeof error))
        return tool_error("%s: %s", path, error);
    return TOOL_OK;
}

int tool_save(const char *path, const float *data, int ndim, const int64_t *shape)
{
    char error[256];
    if (npy_save(path, data, ndim, shape, error, sizeof error))
        return tool_error("%s: %s", path, error);
    return TOOL_OK;
}

void *tool_alloc(int64_t count, size_t size)
{
    void *memory = NULL;
    if (count >= 0 && (uint64_t)count <= PTRDIFF_MAX / size)
        memory = malloc(count ? (size_t)count * size : size);
    if (!memory)
        (void)tool_error("out of memory");
    return memory;
}

void *tool_scratch(size_t size)
{
    void *memory = NULL;
    if (posix_memalign(&memory, QKV_SCRATCH_ALIGN, size ? size : QKV_SCRATCH_ALIGN)) {
        (void)tool_error("out of memory");
        return NULL;
    }
    return memory;
}

/* --------------------------------------------------------------------- time */

double tool_seconds(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

static int ascending(const void *a, const void *b)
{
    const double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

double tool_median(double *values, int64_t count)
{
    qsort(values, (size_t)count, sizeof *values, ascending);
    return 0.5 * (values[(count - 1) / 2] + values[count / 2]);
}
