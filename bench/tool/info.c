/* SPDX-License-Identifier: MIT */
/* qkv info: what machine this is and what the library makes of it. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/utsname.h>
#include <unistd.h>

#include "tool.h"

static const char usage[] = "qkv info";

/* The first line of a small file, without its end. False if there is none. */
static bool read_line(const char *path, char *line, size_t size)
{
    FILE *file = fopen(path, "r");
    const bool found = file && fgets(line, (int)size, file);
    if (file)
        (void)fclose(file);
    if (found)
        line[strcspn(line, "\n")] = '\0';
    return found;
}

/* The value of the first of /proc/cpuinfo's lines that begins with 'key'. */
static bool cpuinfo(const char *key, char *value, size_t size)
{
    char line[512];
    bool found = false;
    FILE *file = fopen("/proc/cpuinfo", "r");
    while (file && !found && fgets(line, sizeof line, file)) {
        const char *colon = strchr(line, ':');
        if (!colon || strncmp(line, key, strlen(key)) != 0)
            continue;
        colon += 1 + strspn(colon + 1, " \t");
        snprintf(value, size, "%.*s", (int)strcspn(colon, "\n"), colon);
        found = true;
    }
    if (file)
        (void)fclose(file);
    return found;
}

static void print_machine(void)
{
    char model[256];
    struct utsname system;
    /* Arm's kernel names no model; its numbers are better than nothing. */
    if (!cpuinfo("model name", model, sizeof model)) {
        char maker[64], part[64];
        if (cpuinfo("CPU implementer", maker, sizeof maker) &&
            cpuinfo("CPU part", part, sizeof part))
            snprintf(model, sizeof model, "implementer %s, part %s", maker, part);
        else
            strcpy(model, "unknown");
    }
    printf("CPU           %s\n", model);
    if (uname(&system) == 0)
        printf("architecture  %s, %ld processors\n", system.machine, sysconf(_SC_NPROCESSORS_ONLN));
}

static void print_caches(void)
{
    bool any = false;
    printf("caches        ");
    for (int index = 0; index < 16; index++) {
        char path[96], level[16], kind[32], size[32];
        const char *folder = "/sys/devices/system/cpu/cpu0/cache/index";
        snprintf(path, sizeof path, "%s%d/level", folder, index);
        if (!read_line(path, level, sizeof level))
            break;
        snprintf(path, sizeof path, "%s%d/type", folder, index);
        if (!read_line(path, kind, sizeof kind) || strcmp(kind, "Instruction") == 0)
            continue;
        snprintf(path, sizeof path, "%s%d/size", folder, index);
        if (!read_line(path, size, sizeof size))
            continue;
        printf("%sL%s %s", any ? ", " : "", level, size);
        any = true;
    }
    printf("%s\n", any ? "" : "unknown");
}

static void print_isas(void)
{
    qkv_isa_info info;
    printf("\n  %-8s  %-8s  %-9s\n", "ISA", "compiled", "supported");
    for (int32_t i = 0; qkv_isa_get(i, &info) == QKV_OK; i++)
        printf("%c %-8s  %-8s  %-9s  %s\n", info.selected ? '*' : ' ', info.name,
               info.compiled ? "yes" : "no", info.supported ? "yes" : "no", info.reason);
}

static void print_environment(void)
{
    const char *wanted = getenv("QKV_ISA");
    if (!wanted || !*wanted) {
        printf("\nQKV_ISA is not set. It lowers the choice: QKV_ISA=scalar qkv info\n");
        return;
    }
    const char *used = qkv_isa_name();
    printf("\nQKV_ISA=%s: %s is used%s\n", wanted, used,
           strcmp(wanted, used) == 0 ? "" : " (the name is not usable here and was ignored)");
}

int tool_info(int argc, char **argv)
{
    if (argc == 2 && strcmp(argv[1], "--help") == 0) {
        printf("usage: %s\n\nShows the CPU and the instruction sets that the library can use.\n",
               usage);
        return TOOL_OK;
    }
    if (tool_options(argc, argv, NULL, 0, NULL, 0, usage))
        return TOOL_ERROR;

    const int version = qkv_version();
    printf("qkv           %d.%d.%d\n", version / 10000, version / 100 % 100, version % 100);
    print_machine();
    print_caches();
    print_isas();
    print_environment();
    return TOOL_OK;
}
