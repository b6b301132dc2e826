/* SPDX-License-Identifier: MIT */
/*
 * Every kernel of kernels.def on every ISA: suite <op>, test <isa>. Each call is
 * watched for what the calling convention promises.
 */
#include "abi.h"
#include "checks.h"

static void run(int id, const char *op, void (*check)(const test_isa *), abi_fp_mode mode)
{
    static const char *const modes[ABI_MODES] = {"", ", denormals flushed", ", rounding upward"};
    static const oracle_arithmetic arithmetic[ABI_MODES] = {
        {.u = 0x1p-24, .tiny = 0x1p-150},
        {.u = 0x1p-24, .tiny = 0x1p-125},
        {.u = 0x1p-23, .tiny = 0x1p-149},
    };
    test_isa isa = test_isa_of(id);
    if (isa.missing) {
        skip_test("%s: %s", isa.name, isa.missing);
        return;
    }
    if (mode != ABI_DEFAULT && !abi_can_watch()) {
        skip_test("floating-point modes: no trampoline for this platform");
        return;
    }
    context("%s on %s%s", op, isa.name, modes[mode]);
    cr_log_info("%s runs on %s%s", op, isa.name, modes[mode]);
    isa.table = abi_watched(isa.table, id < QKV_ISA_COUNT);
    abi_mode(mode);
    oracle_machine = arithmetic[mode];
    if (mode != ABI_DEFAULT)
        effort_thin();
    check(&isa);
}

_Static_assert(QKV_ISA_COUNT == 4 && TEST_ISA_COUNT == 7, "give the new ISA its cases below");

#define CASE(op, isa)                                                                              \
    Test(op, isa)                                                                                  \
    {                                                                                              \
        run(TEST_ISA_##isa, #op, check_##op, ABI_DEFAULT);                                         \
    }
#define CASE_MODES(op, isa)                                                                        \
    CASE(op, isa)                                                                                  \
    Test(op, isa##_flush)                                                                          \
    {                                                                                              \
        run(TEST_ISA_##isa, #op, check_##op, ABI_FLUSH);                                           \
    }                                                                                              \
    Test(op, isa##_upward)                                                                         \
    {                                                                                              \
        run(TEST_ISA_##isa, #op, check_##op, ABI_UPWARD);                                          \
    }
#define QKV_KERNEL(op, ...)                                                                        \
    CASE_MODES(op, scalar)                                                                         \
    CASE_MODES(op, avx2)                                                                           \
    CASE_MODES(op, avx512)                                                                         \
    CASE_MODES(op, neon)                                                                           \
    CASE(op, avx2_simde)                                                                           \
    CASE(op, avx512_simde)                                                                         \
    CASE(op, neon_simde)
#include "kernels.def"
#undef QKV_KERNEL
