/* SPDX-License-Identifier: MIT */
/*
 * What the compiler made: objects that run on every machine hold no
 * instruction above the architecture's baseline, and the scalar kernels, the
 * specification, are not vectorised. Reads objdump's disassembly of the
 * static library.
 */
#include "harness.h"

#include <ctype.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef struct line {
    char member[256]; /* the object file it is in */
    char mnemonic[64], operands[160];
} line;

/* "  1f:\tmulps  %xmm1,%xmm0" */
static bool parse_instruction(const char *text, line *l)
{
    const char *tab = strchr(text, '\t');
    if (!isspace((unsigned char)*text) || !tab || tab == text || tab[-1] != ':')
        return false;
    l->operands[0] = '\0';
    return sscanf(tab, " %63s %159[^\n]", l->mnemonic, l->operands) >= 1;
}

/* Calls 'check' for each instruction; returns how many there were. */
static int64_t for_each_instruction(void (*check)(const line *))
{
    char command[1200], text[512];
    snprintf(command, sizeof command, "'%s' -d --no-show-raw-insn '%s' 2>&1", TEST_OBJDUMP,
             TEST_LIBRARY);
    FILE *pipe = popen(command, "r");
    if (!pipe)
        fail_with("cannot run %s", command);
    line l = {.member = ""};
    int64_t count = 0;
    while (fgets(text, sizeof text, pipe)) {
        const char *format = strstr(text, ":     file format ");
        if (format) {
            snprintf(l.member, sizeof l.member, "%.*s", (int)(format - text), text);
        } else if (parse_instruction(text, &l)) {
            check(&l);
            count++;
        }
    }
    pclose(pipe);
    return count;
}

static bool skip_without_objdump(void)
{
    if (*TEST_OBJDUMP)
        return false;
    skip_test("machine code: objdump was not found");
    return true;
}

/* "..._tile_avx2.c.o" is of an ISA above the baseline. */
static bool is_isa_object(const char *member)
{
    return strstr(member, "_avx2.c") || strstr(member, "_avx512.c") || strstr(member, "_neon.c");
}

static bool is_one_of(const char *mnemonic, const char *const *list)
{
    for (; *list; list++)
        if (strcmp(mnemonic, *list) == 0)
            return true;
    return false;
}

#if defined(__x86_64__)

/* SSE3 to SSE4.2, BMI and the like: everything that x86-64 does not have.
 * VEX and EVEX instructions are recognised by their 'v' or their registers. */
static const char *const above_baseline[] = {
    "movddup",   "movshdup", "movsldup", "haddps",     "haddpd", "hsubps",    "addsubps",
    "lddqu",     "pshufb",   "palignr",  "pabsd",      "phaddd", "pmulhrsw",  "pmaddubsw",
    "blendps",   "blendvps", "pblendvb", "pblendw",    "dpps",   "dppd",      "insertps",
    "extractps", "pextrd",   "pextrq",   "pinsrd",     "pinsrq", "pmulld",    "pmaxsd",
    "pminsd",    "pmovsxdq", "pmovzxdq", "pmovzxbw",   "ptest",  "roundss",   "roundsd",
    "roundps",   "roundpd",  "pcmpeqq",  "pcmpgtq",    "crc32",  "popcnt",    "lzcnt",
    "tzcnt",     "andn",     "bextr",    "blsi",       "blsr",   "blsmsk",    "bzhi",
    "mulx",      "pdep",     "pext",     "rorx",       "sarx",   "shlx",      "shrx",
    "adcx",      "adox",     "movbe",    "sha256msg1", "aesenc", "pclmulqdq", NULL};

static bool is_above_baseline(const line *l)
{
    const bool vex = l->mnemonic[0] == 'v' && strcmp(l->mnemonic, "verr") != 0 &&
                     strcmp(l->mnemonic, "verw") != 0;
    return vex || strstr(l->operands, "%ymm") || strstr(l->operands, "%zmm") ||
           strstr(l->operands, "%k1") || is_one_of(l->mnemonic, above_baseline);
}

static const char *const packed_arithmetic[] = {
    "addps", "subps", "mulps", "divps", "maxps", "minps", "sqrtps", "rcpps", "rsqrtps",
    "addpd", "subpd", "mulpd", "divpd", "maxpd", "minpd", "sqrtpd", NULL};

static bool is_packed_arithmetic(const line *l)
{
    return is_one_of(l->mnemonic, packed_arithmetic);
}

#elif defined(__aarch64__)

/* Advanced SIMD is the baseline; SVE registers and later dot products are not. */
static bool is_above_baseline(const line *l)
{
    static const char *const later[] = {"sdot",  "udot",   "usdot", "smmla",  "ummla",
                                        "bfdot", "bfmmla", "fmlal", "fmlal2", NULL};
    for (const char *z = strchr(l->operands, 'z'); z; z = strchr(z + 1, 'z'))
        if (isdigit((unsigned char)z[1]) && (z == l->operands || !isalnum((unsigned char)z[-1])) &&
            strchr(z, '.'))
            return true;
    return is_one_of(l->mnemonic, later);
}

/* "fmul v0.4s, v1.4s, v2.4s" and the like, but not "fmul s0, s1, s2". */
static bool is_packed_arithmetic(const line *l)
{
    static const char *const operations[] = {"fadd", "fsub", "fmul",   "fdiv",  "fmla", "fmls",
                                             "fmax", "fmin", "fmaxnm", "fsqrt", NULL};
    return l->operands[0] == 'v' && is_one_of(l->mnemonic, operations);
}

#else

static bool is_above_baseline(const line *l)
{
    (void)l;
    return false;
}

static bool is_packed_arithmetic(const line *l)
{
    (void)l;
    return false;
}

#endif

static void check_baseline(const line *l)
{
    if (!is_isa_object(l->member) && is_above_baseline(l))
        fail_with("%s holds '%s %s'", l->member, l->mnemonic, l->operands);
}

Test(machine_code, baseline_outside_isa_folders)
{
    if (skip_without_objdump())
        return;
    context("%s", TEST_LIBRARY);
    const int64_t count = for_each_instruction(check_baseline);
    if (count < 2000)
        fail_with("the disassembly has only %lld instructions", (long long)count);
}

static void check_scalar(const line *l)
{
    if (strstr(l->member, "scalar") && is_packed_arithmetic(l))
        fail_with("%s holds '%s %s'", l->member, l->mnemonic, l->operands);
}

Test(machine_code, scalar_is_not_vectorised)
{
    if (skip_without_objdump())
        return;
    context("%s", TEST_LIBRARY);
    for_each_instruction(check_scalar);
}

/* The other way round: an ISA's objects do use its registers. */
static bool uses_wide_registers;

static void find_wide(const line *l)
{
    const char *const registers[] = {"%ymm", "%zmm", ".4s"};
    for (int i = 0; i < 3; i++)
        if (is_isa_object(l->member) && strstr(l->operands, registers[i]))
            uses_wide_registers = true;
}

Test(machine_code, isa_folders_use_their_isa)
{
    if (skip_without_objdump())
        return;
    if (!qkv_kernels_of(QKV_ISA_avx2) && !qkv_kernels_of(QKV_ISA_avx512) &&
        !qkv_kernels_of(QKV_ISA_neon)) {
        skip_test("machine code: only scalar kernels are compiled in");
        return;
    }
    for_each_instruction(find_wide);
    cr_assert(uses_wide_registers);
}
