#!/bin/sh
# Run an x86-64 program on an emulated processor that has AVX-512, print its
# output and pass on its exit status.
#
# Why Bochs: QEMU's own emulator stops at AVX2 and Valgrind knows no EVEX
# encodings, so on a host without AVX-512 its kernels can be compiled but never
# executed.  Bochs interprets every AVX-512 instruction, exactly rounded and
# with masks and faults as in hardware, but emulates a whole machine: hence the
# small Linux that is started here around the one program.  It needs no
# privileges, no KVM and no disk; expect 20 to 30 seconds for the start on an
# idle host, then 20 to 40 million instructions a second, among them at most some
# 1.5 million 16-lane multiply-adds.
#
# usage: avx512-bochs.sh [-e NAME=VALUE]... [-f FILE]... [--] PROGRAM [ARG]...
#
#   -e  set a variable in the program's environment (which is otherwise empty)
#   -f  make FILE available as well, under its absolute path; relative ARGs
#       are resolved against this directory, as on the host
#
# The program may be static or dynamic: the libraries that ldd names go along.
# It also serves as a wrapper: meson test --wrapper '.../avx512-bochs.sh'
#
#   AVX512_BOCHS_CPU      corei7_skylake_x (the default: F CD BW DQ VL).  Bochs
#                         2.7's Ice Lake and Tiger Lake do not start Linux 6.1
#   AVX512_BOCHS_CACHE    where the kernel is kept between runs
#   AVX512_BOCHS_MEMORY   the guest's memory in MiB (512)
#   AVX512_BOCHS_TIMEOUT  seconds until the whole run is stopped (900)
#   AVX512_BOCHS_KEEP     set to keep the run's folder, with all logs
#
# Exit status: the program's own; 124 after a timeout; 125 when the emulation
# itself failed.

set -eu

cpu=${AVX512_BOCHS_CPU:-corei7_skylake_x}
cache=${AVX512_BOCHS_CACHE:-${XDG_CACHE_HOME:-${HOME:-/tmp}/.cache}/avx512-bochs}
memory=${AVX512_BOCHS_MEMORY:-512}
limit=${AVX512_BOCHS_TIMEOUT:-900}

say() { printf 'avx512-bochs: %s\n' "$*" >&2; }
die() { say "$*"; exit 125; }

# --- arguments ---------------------------------------------------------------

# Quotes a word for the guest's shell.
quote() {
    printf "'"
    printf '%s' "$1" | sed "s/'/'\\\\''/g"
    printf "'"
}

environment=
files=
while getopts e:f: option; do
    case $option in
        e) environment="$environment $(quote "$OPTARG")" ;;
        f) files="$files$(realpath -e -- "$OPTARG")
" || die "no such file: $OPTARG" ;;
        *) die 'usage: avx512-bochs.sh [-e NAME=VALUE]... [-f FILE]... PROGRAM [ARG]...' ;;
    esac
done
shift $((OPTIND - 1))
[ $# -ge 1 ] || die 'no program given'
program=$(realpath -e -- "$1") || die "no such program: $1"
shift

command=$(quote "$program")
for word in "$@"; do
    command="$command $(quote "$word")"
done

# --- tools and kernel --------------------------------------------------------

missing=
need() {
    case $(dpkg-query -W -f '${db:Status-Status}' "$1" 2>/dev/null) in
        installed) ;;
        *) missing="$missing $1" ;;
    esac
}
command -v dpkg-query >/dev/null || die 'this needs a Debian host'
for package in bochs bochsbios vgabios busybox-static isolinux \
    syslinux-common xorriso; do
    need "$package"
done
if [ -n "$missing" ]; then
    [ "$(id -u)" -eq 0 ] || die "please install:$missing"
    say "installing$missing"
    # shellcheck disable=SC2086 # a list of package names
    DEBIAN_FRONTEND=noninteractive apt-get -qq -y \
        -o DPkg::Lock::Timeout=300 --no-install-recommends install $missing \
        >/dev/null || die 'installation failed'
fi

mkdir -p "$cache"
run=$(mktemp -d "${TMPDIR:-/tmp}/avx512-bochs.XXXXXX")
emulator=
# shellcheck disable=SC2329 # the trap invokes it
finish() {
    [ -z "$emulator" ] || kill -KILL "$emulator" 2>/dev/null || :
    if [ -n "${AVX512_BOCHS_KEEP:-}" ]; then
        say "kept $run"
    else
        rm -rf "$run"
    fi
}
trap finish EXIT
trap 'exit 125' HUP INT TERM

# Debian's cloud kernel is the smallest that is ready-made: it has the serial
# port and nothing else of importance built in.  It is unpacked, not installed.
kernel=$cache/vmlinuz
if [ ! -s "$kernel" ]; then
    image=$(apt-cache depends linux-image-cloud-amd64 2>/dev/null |
        sed -n 's/^ *Depends: \(linux-image-[0-9].*\)/\1/p' | head -n 1)
    [ -n "$image" ] || die 'apt knows no linux-image-cloud-amd64'
    say "fetching $image"
    mkdir "$run/deb"
    (cd "$run/deb" && apt-get -qq -o APT::Sandbox::User=root \
        download "$image" >/dev/null) || die "cannot fetch $image"
    dpkg -x "$run"/deb/*.deb "$run/deb/tree"
    cp "$run"/deb/tree/boot/vmlinuz-* "$run/vmlinuz"
    rm -rf "$run/deb"
    mv "$run/vmlinuz" "$kernel"
fi

# --- the guest's files -------------------------------------------------------

root=$run/root
mkdir -p "$root/bin" "$root/proc" "$root/sys" "$root/dev" "$root/tmp" \
    "$root$PWD" "$run/iso"
chmod 1777 "$root/tmp"
cp "$(command -v busybox)" "$root/bin/busybox"
for applet in sh cat env grep mount mkdir stty; do
    ln -s busybox "$root/bin/$applet"
done

add() {
    mkdir -p "$root$(dirname "$1")"
    [ -e "$root$1" ] || cp -L -- "$1" "$root$1"
}
add "$program"
ldd "$program" 2>/dev/null | sed -n 's|^[^/]*\(/[^ ]*\) (0x.*|\1|p' |
    while IFS= read -r library; do
        add "$library"
    done
printf '%s' "$files" | while IFS= read -r file; do
    add "$file"
done

cat >"$root/run" <<END
cd $(quote "$PWD") || exit 125
exec env -i PATH=/bin HOME=/tmp$environment $command </dev/null
END

cat >"$root/init" <<'END'
#!/bin/sh
mount -t proc proc /proc
mount -t sysfs sysfs /sys
mount -t devtmpfs dev /dev
mkdir -p /dev/shm
mount -t tmpfs shm /dev/shm
exec </dev/null >/dev/ttyS0 2>&1
stty raw </dev/ttyS0
for flag in avx512f avx512cd avx512bw avx512dq avx512vl; do
    grep -qw $flag /proc/cpuinfo || missing="$missing $flag"
done
if [ -n "$missing" ]; then
    printf '\n@avx512-missing%s\n' "$missing"
else
    printf '\n@avx512-begin\n'
    sh /run
    printf '\n@avx512-exit %d\n' $?
fi
while :; do read -r nothing; done </dev/ttyS0
END
chmod +x "$root/init"

# Not compressed: the emulated disk is faster than the emulated gunzip.
(cd "$root" && find . | busybox cpio -o -H newc 2>/dev/null) >"$run/iso/initrd"
cp "$kernel" "$run/iso/linux"
cp /usr/lib/ISOLINUX/isolinux.bin "$run/iso/"
cp /usr/lib/syslinux/modules/bios/ldlinux.c32 "$run/iso/"

# XSAVES and XSAVEC are hidden because Bochs 2.7 reports a size for the
# compacted format that Linux does not believe, and Linux would then switch off
# everything from AVX up.  The rest saves time: cryptomgr.notests alone takes
# some 17 seconds off the start.
cat >"$run/iso/isolinux.cfg" <<'END'
default linux
prompt 0
label linux
    kernel linux
    initrd initrd
    append console=ttyS0,115200 quiet loglevel=1 panic=-1 clearcpuid=xsaves,xsavec nokaslr mitigations=off nosmp noapic nolapic acpi=off tsc=reliable clocksource=tsc no_timer_check lpj=1000000 random.trust_cpu=on edd=off audit=0 apparmor=0 ipv6.disable=1 nowatchdog cryptomgr.notests initcall_blacklist=load_system_certificate_list,tracer_init_tracefs
END
xorriso -as mkisofs -quiet -o "$run/boot.iso" -b isolinux.bin -c boot.cat \
    -no-emul-boot -boot-load-size 4 -boot-info-table "$run/iso" \
    >"$run/xorriso.log" 2>&1 || die "$(tail -n 1 "$run/xorriso.log")"

# --- the machine -------------------------------------------------------------

# Of the displays in Debian's bochs, rfb (VNC) is the one that needs neither a
# terminal nor an X server; nobody has to connect.  Debian's bochs waits in its
# debugger at the start: "c" lets it continue.
cat >"$run/bochsrc" <<END
config_interface: textconfig
display_library: rfb, options="timeout=0"
plugin_ctrl: speaker=0, gameport=0, parallel=0
cpu: model=$cpu, count=1, ips=20000000, reset_on_triple_fault=0
memory: guest=$memory, host=$memory
romimage: file=/usr/share/bochs/BIOS-bochs-latest
vgaromimage: file=/usr/share/bochs/VGABIOS-lgpl-latest
pci: enabled=1, chipset=i440fx
ata0-master: type=cdrom, path=$run/boot.iso, status=inserted
boot: cdrom
com1: enabled=1, mode=file, dev=$run/serial
clock: sync=none
log: $run/bochs.log
panic: action=fatal
error: action=ignore
info: action=ignore
debug: action=ignore
END
echo c >"$run/debugger"
: >"$run/serial"

timeout "$limit" bochs -q -f "$run/bochsrc" -rc "$run/debugger" \
    </dev/null >"$run/bochs.out" 2>&1 &
emulator=$!

# The emulator is stopped as soon as the program has ended.  The line break in
# front of the last marker is not the program's own.  (A shell loop, because
# some awks only read a pipe in whole blocks.)
tail -f -n +1 -s 0.2 --pid="$emulator" "$run/serial" 2>/dev/null | {
    started=
    held=
    last=
    while IFS= read -r line; do
        case $line in
            '@avx512-begin') started=1 ;;
            '@avx512-exit '* | '@avx512-missing '*)
                [ -z "$held" ] || [ -z "$last" ] || printf '%s' "$last"
                held=
                printf '%s\n' "$line" >"$run/result"
                kill "$emulator" 2>/dev/null || :
                break
                ;;
            *)
                [ -n "$started" ] || continue
                [ -z "$held" ] || printf '%s\n' "$last"
                last=$line
                held=1
                ;;
        esac
    done
    [ -z "$held" ] || printf '%s\n' "$last"
}

status=0
wait "$emulator" 2>/dev/null || status=$?
emulator=
case $(cat "$run/result" 2>/dev/null) in
    @avx512-exit*) exit "$(sed 's/.* //' "$run/result")" ;;
    @avx512-missing*) die "the guest lacks$(sed 's/^@avx512-missing//' "$run/result") ($cpu)" ;;
esac
if [ "$status" -eq 124 ]; then
    say "stopped after $limit seconds"
    exit 124
fi
tail -n 5 "$run/bochs.out" "$run/serial" >&2
die "the emulator ended early (status $status)"
