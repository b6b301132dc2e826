#!/bin/sh
# Prepare DIR so that `meson setup --cross-file DIR/aarch64.ini` builds the
# library and its Criterion tests for AArch64, and `meson test` runs them on an
# x86-64 Debian host under QEMU's user-mode emulator.
#
# Why a private sysroot: Debian's libcriterion-dev cannot be installed for two
# architectures at once, and adding a foreign architecture to dpkg changes the
# host for good.  So the arm64 packages are resolved and fetched through an apt
# state of their own and only unpacked, never installed.
#
# Why binfmt_misc: Criterion starts every test by executing its own binary
# again.  That second execution goes through the kernel and not through Meson's
# exe_wrapper, so the kernel has to know how to start an AArch64 program.
#
# usage: aarch64-sysroot.sh DIR
#
# Needs root for the two things that alter the host: installing missing tools,
# and registering QEMU with binfmt_misc.  Neither happens when already done.
#
#   DEBIAN_MIRROR  mirror for the arm64 packages (http://deb.debian.org/debian)
#   DEBIAN_SUITE   suite to take them from       (the host's own)
#
# The processor model is chosen when the tests run, through QEMU_CPU:
# cortex-a53 is plain Armv8.0, neoverse-n1 adds dotprod and fp16, max has
# everything that QEMU knows.

set -eu

# A change to what goes into the sysroot must change this, to refresh old ones.
version=2
target_packages='libcriterion-dev libsimde-dev'
triplet=aarch64-linux-gnu
qemu=/usr/bin/qemu-aarch64-static
binfmt=/proc/sys/fs/binfmt_misc

say() { printf 'aarch64-sysroot: %s\n' "$*"; }
die() { printf 'aarch64-sysroot: %s\n' "$*" >&2; exit 1; }

[ $# -eq 1 ] || die 'usage: aarch64-sysroot.sh DIR'
command -v dpkg-query >/dev/null || die 'this needs a Debian host'

mkdir -p "$1"
dir=$(cd "$1" && pwd)
sysroot=$dir/sysroot
log=$dir/apt.log
case $dir in *[\'\\]*) die "DIR must not hold quotes or backslashes: $dir" ;; esac
case $dir in *[[:space:]]*) die "DIR must not hold blanks: $dir" ;; esac

as_root() {
    [ "$(id -u)" -eq 0 ] || die "must be root to $1"
}

# Another apt may hold a lock; apt-get itself is told to wait for it.
apt() {
    DEBIAN_FRONTEND=noninteractive \
        apt-get -qq -y -o DPkg::Lock::Timeout=300 "$@" >"$log" 2>&1 || {
        cat "$log" >&2
        die "apt-get failed: $*"
    }
}

# --- the host's tools --------------------------------------------------------

missing=
need() {
    case $(dpkg-query -W -f '${db:Status-Status}' "$1" 2>/dev/null) in
        installed) ;;
        *) missing="$missing $1" ;;
    esac
}
need gcc-aarch64-linux-gnu
need libc6-dev-arm64-cross
need qemu-user-static
command -v pkg-config >/dev/null || need pkg-config
command -v meson >/dev/null || need meson

if [ -n "$missing" ]; then
    as_root "install$missing"
    say "installing$missing"
    # shellcheck disable=SC2086 # a list of package names
    apt install --no-install-recommends $missing ||
        die 'installation failed'
fi

# --- the arm64 libraries -----------------------------------------------------

suite=${DEBIAN_SUITE:-$(. /etc/os-release && echo "${VERSION_CODENAME:-stable}")}
mirror=${DEBIAN_MIRROR:-http://deb.debian.org/debian}
stamp=$dir/sysroot.stamp
wanted="$version $suite $mirror $target_packages"

if [ ! -d "$sysroot" ] || [ "$(cat "$stamp" 2>/dev/null)" != "$wanted" ]; then
    say "fetching arm64 $target_packages and what it needs ($suite)"
    state=$dir/apt
    rm -rf "$state" "$sysroot" "$sysroot.part" "$stamp"
    mkdir -p "$state/lists/partial" "$state/cache/archives/partial" "$sysroot.part"
    : >"$state/status"
    keyring=/usr/share/keyrings/debian-archive-keyring.gpg
    echo "deb [arch=arm64 signed-by=$keyring] $mirror $suite main" \
        >"$state/sources.list"

    # An empty status file makes apt resolve the complete set, C library
    # included: nothing is taken from what the host happens to have.
    private() {
        apt -o APT::Architecture=arm64 -o APT::Architectures::=arm64 \
            -o APT::Sandbox::User=root \
            -o Dir::State="$state" -o Dir::State::lists="$state/lists" \
            -o Dir::State::status="$state/status" \
            -o Dir::Cache="$state/cache" -o Dir::Etc::sourceparts=- \
            -o Dir::Etc::sourcelist="$state/sources.list" \
            -o Debug::NoLocking=1 "$@"
    }
    private update
    # shellcheck disable=SC2086 # a list of package names
    private --download-only --no-install-recommends install $target_packages

    count=0
    for deb in "$state"/cache/archives/*.deb; do
        dpkg -x "$deb" "$sysroot.part"
        count=$((count + 1))
    done

    # An absolute link would lead out of the sysroot, to the host's files.
    find "$sysroot.part" -type l | while IFS= read -r link; do
        to=$(readlink "$link")
        case $to in
            /*) ln -sfn "$(realpath -m --relative-to="$(dirname "$link")" \
                    "$sysroot.part$to")" "$link" ;;
        esac
    done

    mv "$sysroot.part" "$sysroot"
    rm -rf "$state"
    echo "$wanted" >"$stamp"
    say "unpacked $count packages into $sysroot"
fi
rm -f "$log"

# --- Meson's description of the target ---------------------------------------

# QEMU_LD_PREFIX and not -L: Criterion's children inherit the environment, but
# not the command line of the emulator.
cat >"$dir/aarch64.ini.part" <<END
# Written by aarch64-sysroot.sh
[binaries]
c = ['$triplet-gcc', '--sysroot=$sysroot']
ar = '$triplet-gcc-ar'
nm = '$triplet-nm'
strip = '$triplet-strip'
objcopy = '$triplet-objcopy'
pkg-config = 'pkg-config'
pkgconfig = 'pkg-config'
exe_wrapper = ['env', 'QEMU_LD_PREFIX=$sysroot', '$qemu']

[properties]
needs_exe_wrapper = true
sys_root = '$sysroot'
pkg_config_libdir = ['$sysroot/usr/lib/$triplet/pkgconfig', '$sysroot/usr/share/pkgconfig']

[host_machine]
system = 'linux'
cpu_family = 'aarch64'
cpu = 'armv8-a'
endian = 'little'
END
if cmp -s "$dir/aarch64.ini.part" "$dir/aarch64.ini"; then
    rm -f "$dir/aarch64.ini.part"
else
    mv "$dir/aarch64.ini.part" "$dir/aarch64.ini"
    say "wrote $dir/aarch64.ini"
fi

# --- the kernel's handler ----------------------------------------------------

# Whatever name it was registered under, an enabled handler for this machine
# (EM_AARCH64 is 183, 0xb7) will do; flag F means that the kernel keeps the
# emulator open, so that it is found from any root folder.
registered() {
    grep -q '^enabled' "$binfmt/status" 2>/dev/null || return 1
    for entry in "$binfmt"/*; do
        case ${entry##*/} in status | register) continue ;; esac
        grep -q '^enabled' "$entry" 2>/dev/null &&
            grep -Eq '^magic 7f454c460201.*b700$' "$entry" && return 0
    done
    return 1
}

if ! registered; then
    as_root 'register QEMU with binfmt_misc'
    if [ ! -e "$binfmt/register" ]; then
        modprobe binfmt_misc 2>/dev/null || :
        mount -t binfmt_misc binfmt_misc "$binfmt" ||
            die 'cannot mount binfmt_misc'
    fi
    if ! registered; then
        # Only the ELF header's fields that identify the machine are compared;
        # the mask lets pass any OS ABI, and both ET_EXEC and ET_DYN.
        printf '%s' ':qemu-aarch64:M::\x7fELF\x02\x01\x01\x00\x00\x00\x00\x00\x00\x00\x00\x00\x02\x00\xb7\x00:\xff\xff\xff\xff\xff\xff\xff\x00\xff\xff\xff\xff\xff\xff\xff\xff\xfe\xff\xff\xff:'"$qemu"':F' \
            >"$binfmt/register" || die 'binfmt_misc refused the registration'
        say "registered $qemu for AArch64 programs"
    fi
fi
