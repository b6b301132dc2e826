# SPDX-License-Identifier: MIT
"""What the scripts beside it share: qkv-bench run on a shape, and how they end."""
import argparse
import json
import subprocess
import sys


def parser(description, seconds):
    """The options that every such script has."""
    options = argparse.ArgumentParser(description=description.splitlines()[0])
    options.add_argument("bench", help="path of qkv-bench")
    options.add_argument("--isa")
    options.add_argument("--clock", default="wall")
    options.add_argument("--seconds", type=float, default=seconds)
    options.add_argument("--alone", action="store_true")
    options.add_argument("--json", metavar="FILE")
    return options


def medians(args, shape, kernels, rounds, dtype="f32"):
    """Nanoseconds by ISA and kernel."""
    command = [args.bench, "--json", "--shape", shape, "--dtype", dtype]
    command += ["--seconds", str(args.seconds), "--rounds", str(rounds), "--clock", args.clock]
    for name in kernels:
        command += ["--kernel", name]
    if args.isa:
        command += ["--isa", args.isa]
    if args.alone:
        command.append("--alone")
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    times = {}
    for line in done.stdout.splitlines():
        result = json.loads(line)
        times.setdefault(result["isa"], {})[result["kernel"]] = result["median_ns"]
    return times


def end(args, rows, complaint):
    """Writes what was asked for; status 1 if there is something to complain of."""
    if args.json:
        with open(args.json, "w", encoding="utf-8") as file:
            json.dump(rows, file, indent=1)
            file.write("\n")
    if complaint:
        print(complaint)
        sys.exit(1)
