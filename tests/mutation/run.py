#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""Does the test suite notice faults? Plants those of faults.txt one at a time.

usage: tests/mutation/run.py [--only TEXT] [--from N] [--first N] [--list] [--trust] [FOLDER]

Copies the tree to FOLDER (build-mutation), builds the copy and sees its tests
pass. Then for each fault: plants it, builds, runs the tests that faults.txt
names, and all others if those pass. A fault is caught if a test fails or does
not end. One that is not caught, or whose text is not in its file any more,
makes this program fail. --only takes faults whose line holds TEXT.
"""

import argparse
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
TIMEOUT = 1200  # seconds for all tests; a fault that waits for ever is caught
LOST = "lost"
CPU_LIMIT = 120  # seconds of computing for one test, which takes a few; one that loops is caught


def read_faults(path):
    faults, current = [], None
    for number, line in enumerate(path.read_text().splitlines(), 1):
        if not line.strip() or line.startswith("#"):
            continue
        if line.startswith("- ") or line.startswith("+ "):
            current[line[0]].append(line[2:])
            continue
        parts = [part.strip() for part in line.split("|", 2)]
        if len(parts) != 3:
            sys.exit(f"{path}:{number}: expected FILE | FILTER | WHAT IS WRONG")
        current = {"file": parts[0], "filter": parts[1], "what": parts[2], "-": [], "+": []}
        current["line"] = number
        faults.append(current)
    return faults


def plant(fault, text):
    """The text with the fault in it; None if its anchor is missing."""
    words = " ".join(fault["-"]).split()
    pattern = r"\s+".join(re.escape(word) for word in words)
    match = re.search(pattern, text)
    if not match:
        return None
    return text[: match.start()] + "\n".join(fault["+"]) + text[match.end() :]


def copy_tree(target):
    names = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT, check=True, capture_output=True, text=True,
    ).stdout.splitlines()
    for name in names:
        source, copy = ROOT / name, target / name
        if not source.is_file():
            continue
        if copy.is_file() and copy.read_bytes() == source.read_bytes():
            continue  # keeps its time, so that nothing is compiled again
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(source, copy)


def build(folder):
    return subprocess.run(
        ["ninja", "-C", str(folder), "tests/qkv-tests"], capture_output=True, text=True
    )


def is_lost(pid):
    """Criterion waits for ever if it loses a worker's message: no worker is left then."""
    try:
        return not Path(f"/proc/{pid}/task/{pid}/children").read_text().strip()
    except OSError:
        return False


def run_tests(command):
    """Exit code and what is printed; no code if they do not end, LOST if their runner is lost."""
    process = subprocess.Popen(
        command, env=dict(os.environ, QKV_TEST_EFFORT="quick"), stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, text=True, start_new_session=True,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_CPU, (CPU_LIMIT, CPU_LIMIT)),
    )
    alone = 0
    for _ in range(TIMEOUT // 10):
        try:
            output, _ = process.communicate(timeout=10)
            return process.returncode, output
        except subprocess.TimeoutExpired:
            alone = alone + 1 if is_lost(process.pid) else 0
        if alone == 6:
            break
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
    return (LOST if alone == 6 else None), ""


def tests_pass(folder, pattern):
    """True or False, or None if no test ran. Tests that end without a result are no answer."""
    command = [str(folder / "tests/qkv-tests"), "--fail-fast"]
    if pattern:
        command += ["--filter", pattern]
    for _ in range(5):
        code, output = run_tests(command)
        tested = re.search(r"Tested: \S*?(\d+)", re.sub(r"\033\[[0-9;]*m", "", output))
        if code is None or (code != LOST and tested):
            break
    else:
        sys.exit("the tests end without a result:\n" + output[-2000:])
    if code == 0 and tested and int(tested.group(1)) == 0:
        return None
    return code == 0


def try_fault(fault, source, folder):
    path = source / fault["file"]
    text = path.read_text()
    planted = plant(fault, text)
    if planted is None:
        return "NO ANCHOR"
    path.write_text(planted)
    try:
        made = build(folder)
        if made.returncode != 0:
            return "DOES NOT BUILD"
        first = tests_pass(folder, fault["filter"])
        if first is None:
            return "FILTER NAMES NO TEST"
        if not first:
            return "caught"
        return "NOT CAUGHT" if tests_pass(folder, None) else "caught elsewhere"
    finally:
        path.write_text(text)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", nargs="?", default=str(ROOT / "build-mutation"))
    parser.add_argument("--only", default="")
    parser.add_argument("--first", type=int)
    parser.add_argument("--from", type=int, default=1, dest="start", help="begin with fault N")
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--trust", action="store_true", help="do not run the tests without a fault")
    options = parser.parse_args()

    faults = read_faults(HERE / "faults.txt")
    missing = [f for f in faults if plant(f, (ROOT / f["file"]).read_text()) is None]
    for f in missing:
        print(f"faults.txt:{f['line']}: not in {f['file']}: {' '.join(f['-'])}")
    faults = [f for f in faults if options.only in f"{f['file']} | {f['filter']} | {f['what']}"]
    faults = faults[options.start - 1 : options.first]
    if options.list:
        for f in faults:
            print(f"{f['file']}: {f['what']}")
        print(f"{len(faults)} faults, {len(missing)} without their text")
        return 1 if missing else 0

    source, folder = Path(options.folder) / "source", Path(options.folder) / "build"
    copy_tree(source)
    if not (folder / "build.ninja").exists():
        setup = ["meson", "setup", str(folder), str(source), "-Dsimde=none",
                 "-Doptimization=1", "-Ddebug=false"]
        subprocess.run(setup, check=True, stdout=subprocess.DEVNULL)
    made = build(folder)
    if made.returncode != 0:
        sys.exit("the tree does not build:\n" + made.stdout[-2000:])
    if not options.trust and not tests_pass(folder, None):
        sys.exit("the tests fail without any fault")

    caught = 0
    for number, fault in enumerate(faults, options.start):
        start = time.time()
        verdict = try_fault(fault, source, folder)
        caught += verdict.startswith("caught")
        print(f"{number:3d} {verdict:16s} {fault['file']}: {fault['what']}"
              f" ({time.time() - start:.0f} s)", flush=True)
    print(f"{caught} of {len(faults)} faults caught")
    return 0 if caught == len(faults) and not missing else 1


if __name__ == "__main__":
    sys.exit(main())
