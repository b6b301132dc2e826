/* SPDX-License-Identifier: MIT */
/*
 * The attention weights of every head as an SVG picture: one grid a head, a
 * row for each query, a column for each key.
 *
 * To keep the file small a weight becomes one of LEVELS colours, neighbours
 * of one colour become one rectangle, and all of a head's rectangles of one
 * colour are one path.
 */
#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "layer.h"
#include "outfile.h"

enum {
    LEVELS = 24,
    COLUMNS = 4,          /* grids side by side */
    LABELLED_TOKENS = 48, /* with more the cells are too small for text */
    FAINTEST = 4          /* then no colour below this level is drawn either */
};

struct sheet {
    FILE *svg;
    const struct layer_data *data;
    int cell, label; /* sizes in pixels: of a cell, of the labels' margin */
    bool labelled;
    int grid, pitch_x, pitch_y, rows;
};

static void put_escaped(FILE *svg, const char *text)
{
    for (; *text; text++) {
        switch (*text) {
        case '&':
            fputs("&amp;", svg);
            break;
        case '<':
            fputs("&lt;", svg);
            break;
        case '>':
            fputs("&gt;", svg);
            break;
        case '"':
            fputs("&quot;", svg);
            break;
        default:
            fputc(*text, svg);
        }
    }
}

/* The root spreads out the small weights, which are most of them. */
static int level_of(float weight)
{
    if (!(weight > 0.0f))
        return 0;
    const int level = (int)(sqrt((double)weight) * LEVELS);
    return level < LEVELS ? level : LEVELS - 1;
}

/* White, through orange and purple, to near black. */
static void put_colour(FILE *svg, int level)
{
    static const double stops[5][3] = {
        {255, 255, 255}, {253, 208, 142}, {233, 105, 74}, {151, 35, 108}, {43, 13, 74}};
    const double place = 4.0 * level / (LEVELS - 1);
    const int lower = place < 3.0 ? (int)place : 3;
    const double part = place - lower;
    fputc('#', svg);
    for (int c = 0; c < 3; c++)
        fprintf(svg, "%02x",
                (unsigned)lround(stops[lower][c] + part * (stops[lower + 1][c] - stops[lower][c])));
}

/* All cells of one colour of one head, as a path; nothing where there is none. */
static void put_level(const struct sheet *s, const float *weights, int level)
{
    const int64_t tokens = s->data->tokens;
    bool open = false;
    for (int64_t i = 0; i < tokens; i++) {
        for (int64_t j = 0, end; j < tokens; j = end) {
            for (end = j; end < tokens && level_of(weights[i * tokens + end]) == level; end++)
                ;
            if (end == j) {
                end = j + 1;
                continue;
            }
            if (!open) {
                fputs("<path fill=\"", s->svg);
                put_colour(s->svg, level);
                fputs("\" d=\"", s->svg);
                open = true;
            }
            const long long width = (end - j) * s->cell;
            fprintf(s->svg, "M%lld %lldh%lldv%dh-%lldz", (long long)j * s->cell,
                    (long long)i * s->cell, width, s->cell, width);
        }
    }
    if (open)
        fputs("\"/>\n", s->svg);
}

/* Weights from 0.1 on as two digits, and with a tooltip. */
static void put_numbers(const struct sheet *s, const float *weights)
{
    const int64_t tokens = s->data->tokens;
    for (int64_t i = 0; i < tokens; i++) {
        for (int64_t j = 0; j < tokens; j++) {
            const float weight = weights[i * tokens + j];
            if (!(weight >= 0.1f))
                continue;
            const int hundredths = (int)lround(100.0 * (double)weight);
            fprintf(s->svg, "<text class=\"%s\" x=\"%lld\" y=\"%lld\"><title>",
                    level_of(weight) >= LEVELS / 2 ? "w" : "n",
                    (long long)(j * s->cell + s->cell / 2),
                    (long long)(i * s->cell + s->cell / 2 + 3));
            put_escaped(s->svg, s->data->words[i]);
            fputs(" → ", s->svg);
            put_escaped(s->svg, s->data->words[j]);
            fprintf(s->svg, " %.3f</title>", (double)weight);
            fprintf(s->svg, hundredths >= 100 ? "1" : ".%02d", hundredths);
            fputs("</text>\n", s->svg);
        }
    }
}

static void put_labels(const struct sheet *s)
{
    for (int64_t i = 0; i < s->data->tokens; i++) {
        const long long middle = i * s->cell + s->cell / 2;
        fprintf(s->svg, "<text class=\"r\" x=\"-4\" y=\"%lld\">", middle + 4);
        put_escaped(s->svg, s->data->words[i]);
        fprintf(s->svg, "</text><text class=\"c\" transform=\"translate(%lld,-4)rotate(-60)\">",
                middle + 4);
        put_escaped(s->svg, s->data->words[i]);
        fputs("</text>\n", s->svg);
    }
}

static void put_head(const struct sheet *s, const float *weights, int64_t head)
{
    const long long x = head % COLUMNS * s->pitch_x + s->label;
    const long long y = head / COLUMNS * s->pitch_y + s->label + 70;
    fprintf(s->svg, "<g transform=\"translate(%lld,%lld)\">\n", x, y);
    fprintf(s->svg, "<text class=\"h\" x=\"%d\" y=\"%d\">head %lld</text>\n", s->grid / 2,
            s->grid + 18, (long long)head);
    for (int level = s->labelled ? 1 : FAINTEST; level < LEVELS; level++)
        put_level(s, weights, level);
    fprintf(s->svg, "<rect class=\"f\" width=\"%d\" height=\"%d\"/>\n", s->grid, s->grid);
    if (s->labelled) {
        put_labels(s);
        put_numbers(s, weights);
    }
    fputs("</g>\n", s->svg);
}

static void put_legend(const struct sheet *s)
{
    fputs("<text class=\"t\" x=\"16\" y=\"28\">Attention weights</text>\n"
          "<text class=\"s\" x=\"16\" y=\"48\">Each row is a token; its cells show how much it "
          "attends to the token of the column.",
          s->svg);
    if (!s->labelled)
        fprintf(s->svg, " Weights below %.2f are not drawn.",
                (double)(FAINTEST * FAINTEST) / (LEVELS * LEVELS));
    fputs("</text>\n", s->svg);
    fprintf(s->svg, "<g transform=\"translate(%d,16)\">\n", s->pitch_x * COLUMNS - 260);
    for (int level = 0; level < LEVELS; level++) {
        fprintf(s->svg, "<rect x=\"%d\" width=\"10\" height=\"12\" fill=\"", level * 10);
        put_colour(s->svg, level);
        fputs("\"/>\n", s->svg);
    }
    fprintf(s->svg, "<rect class=\"f\" width=\"%d\" height=\"12\"/>\n", LEVELS * 10);
    static const double marks[] = {0.0, 0.05, 0.25, 0.5, 1.0};
    for (size_t m = 0; m < sizeof marks / sizeof *marks; m++)
        fprintf(s->svg, "<text class=\"m\" x=\"%.0f\" y=\"26\">%g</text>\n",
                sqrt(marks[m]) * LEVELS * 10, marks[m]);
    fputs("</g>\n", s->svg);
}

static void put_sheet(const struct sheet *s, const float *weights)
{
    const int width = s->pitch_x * COLUMNS + 16, height = s->pitch_y * s->rows + 80;
    fprintf(s->svg,
            "<?xml version=\"1.0\" encoding=\"UTF-8\"?>\n"
            "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"%d\" height=\"%d\" "
            "viewBox=\"0 0 %d %d\" font-family=\"sans-serif\" font-size=\"12\">\n"
            "<title>Attention weights of every head</title>\n"
            "<style>.r{text-anchor:end}.h,.n,.w,.m{text-anchor:middle}.n,.w{font-size:9px}"
            ".w{fill:#fff}.t{font-size:20px}.h{font-weight:bold;font-size:14px}.m{font-size:10px}"
            ".f{fill:none;stroke:#888}</style>\n"
            "<rect width=\"%d\" height=\"%d\" fill=\"#fff\"/>\n",
            width, height, width, height, width, height);
    put_legend(s);
    for (int64_t h = 0; h < s->data->heads; h++)
        put_head(s, weights + h * s->data->tokens * s->data->tokens, h);
    fputs("</svg>\n", s->svg);
}

int heatmap_write(const char *path, const struct layer_data *data, const float *weights)
{
    if (data->tokens > 4096 || data->heads > 256)
        return tool_error("%s: too many tokens or heads for a picture", path);

    struct sheet sheet = {.data = data, .labelled = data->tokens <= LABELLED_TOKENS};
    int longest = 0;
    for (int64_t i = 0; i < data->tokens; i++)
        if (text_width(data->words[i]) > longest)
            longest = text_width(data->words[i]);
    sheet.cell = sheet.labelled ? 18 : 2;
    sheet.label = sheet.labelled ? 16 + 7 * (longest < 20 ? longest : 20) : 16;
    sheet.grid = (int)data->tokens * sheet.cell;
    sheet.pitch_x = sheet.grid + sheet.label + 12;
    sheet.pitch_y = sheet.grid + sheet.label + 30;
    sheet.rows = (int)((data->heads + COLUMNS - 1) / COLUMNS);

    struct outfile file;
    if (outfile_open(&file, path) == 0) {
        sheet.svg = file.stream;
        put_sheet(&sheet, weights);
        if (outfile_commit(&file) == 0)
            return TOOL_OK;
    }
    const int reason = errno;
    outfile_abandon(&file);
    return tool_error("%s: cannot be written: %s", path, strerror(reason));
}
