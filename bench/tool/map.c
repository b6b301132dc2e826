/* SPDX-License-Identifier: MIT */
/* Attention as text. */
#include "layer.h"

#include <langinfo.h>
#include <locale.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum {
    BAR = 10, /* characters of a bar for the weight 1 */
    WORD_WIDTH = 12,
    TOP = 3
};

struct style style_of_terminal(void)
{
    const char *no_colour = getenv("NO_COLOR");
    const char *terminal = getenv("TERM");
    (void)setlocale(LC_CTYPE, "");
    return (struct style){
        .colour = isatty(STDOUT_FILENO) && !(no_colour && *no_colour) && terminal &&
                  strcmp(terminal, "dumb") != 0,
        .unicode = strcmp(nl_langinfo(CODESET), "UTF-8") == 0,
    };
}

int text_width(const char *text)
{
    int width = 0;
    for (; *text; text++)
        width += ((unsigned char)*text & 0xc0) != 0x80;
    return width;
}

void print_padded(const char *text, int width, bool right)
{
    const int space = width - text_width(text);
    if (right && space > 0)
        printf("%*s", space, "");
    fputs(text, stdout);
    if (!right && space > 0)
        printf("%*s", space, "");
}

/* BAR characters: filled to an eighth of a character, or to a whole one. */
static void print_bar(double weight, struct style style)
{
    static const char *const eighths[] = {"", "▏", "▎", "▍", "▌", "▋", "▊", "▉"};
    const double part = weight >= 0.0 && weight <= 1.0 ? weight : 0.0;
    const int steps = (int)(part * BAR * 8.0 + 0.5);
    int used = 0;

    if (style.colour)
        fputs(weight >= 0.25 ? "\033[33m" : "\033[36m", stdout);
    if (style.unicode) {
        for (; used < steps / 8; used++)
            fputs("█", stdout);
        fputs(eighths[steps % 8], stdout);
        used += steps % 8 != 0;
    } else {
        for (; used < (steps + 4) / 8; used++)
            fputc('#', stdout);
    }
    if (style.colour)
        fputs("\033[0m", stdout);
    printf("%*s", BAR - used, "");
}

static void print_target(double weight, const char *word, bool last, struct style style)
{
    print_bar(weight, style);
    printf(" %.2f ", weight);
    if (style.colour && weight >= 0.25)
        fputs("\033[1m", stdout);
    print_padded(word, last ? 0 : WORD_WIDTH, false);
    if (style.colour)
        fputs("\033[0m", stdout);
    fputs(last ? "\n" : " ", stdout);
}

/* Prints the TOP largest of a row of weights, largest first. */
static void print_row(const struct layer_data *data, const float *row, struct style style)
{
    const int64_t wanted = data->tokens < TOP ? data->tokens : TOP;
    int64_t top[TOP];
    for (int64_t n = 0; n < wanted; n++) {
        top[n] = -1;
        for (int64_t j = 0; j < data->tokens; j++) {
            bool taken = false;
            for (int64_t m = 0; m < n; m++)
                taken |= top[m] == j;
            if (!taken && (top[n] < 0 || row[j] > row[top[n]]))
                top[n] = j;
        }
        print_target((double)row[top[n]], data->words[top[n]], n + 1 == wanted, style);
    }
}

int map_print(const struct layer_data *data, const float *weights, struct style style)
{
    for (int64_t i = 0; i < data->tokens; i++) {
        print_padded(data->words[i], WORD_WIDTH, true);
        fputs("  ", stdout);
        print_row(data, weights + i * data->tokens, style);
    }
    return TOOL_OK;
}

void map_print_token(const struct layer_data *data, const float *weights, int64_t token,
                     struct style style)
{
    for (int64_t h = 0; h < data->heads; h++) {
        printf("     head %2lld  ", (long long)h);
        print_row(data, weights + (h * data->tokens + token) * data->tokens, style);
    }
}
