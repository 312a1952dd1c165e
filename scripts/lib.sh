# shellcheck shell=bash
# Helpers of scripts/quickstart and scripts/test. Sourced, never run.
#
# Owns: numbered steps with times, the report when one fails, packages, the Rust tool chain, the build, the
# guest kernel, the templates, and the inventory that shows whether anything was left behind.
#
# Cargo never runs as root in a checkout that belongs to somebody else: it would leave files in `target`
# that the owner cannot replace. Whoever owns the checkout is the builder; root does the rest.

set -Eeuo pipefail
# Some root shells lack the sbin directories.
export PATH="$PATH:/usr/local/sbin:/usr/sbin:/sbin" LC_ALL=C

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)
TRIPLE=x86_64-unknown-linux-gnu
MIN_RUST_MINOR=89
FIRECRACKER_RELEASE=v1.16.1
GIB=$((1024 * 1024 * 1024))

case ${CARGO_TARGET_DIR:-} in
    "") TARGET=$ROOT/target ;;
    /*) TARGET=$CARGO_TARGET_DIR ;;
    *) TARGET=$PWD/$CARGO_TARGET_DIR ;;
esac
HEARTH=$TARGET/$TRIPLE/release/hearth
GUEST_BIN=$TARGET/$TRIPLE/release/hearth-guest
if [[ ${HEARTH_TEST_PROFILE:-release} == dev ]]; then
    HEARTH=$TARGET/$TRIPLE/debug/hearth
fi

# ---------------------------------------------------------------- steps and failures

STEP=0 STEPS=0 STEP_NAME="start" STEP_BEGAN=$SECONDS REMEDY="" FAILED_AT="" REPORTED=""
TEMPS=() LOG="" KEEP_LOG=""

say() { printf '    %s\n' "$*"; }

# From here on every end of the script passes on_exit.
catch_exits() {
    trap 'FAILED_AT="line $LINENO: $BASH_COMMAND"' ERR
    trap 'on_exit $?' EXIT
    trap 'exit 130' INT
    trap 'exit 143' TERM
}

# begin_steps TOTAL
begin_steps() {
    STEPS=$1
    catch_exits
    LOG=$(mktemp "${TMPDIR:-/tmp}/hearth-log.XXXXXX")
}

# usage REASON: ends the script for wrong arguments.
usage() {
    printf '%s; try --help\n' "$1" >&2
    REPORTED=1
    exit 2
}

# step NAME REMEDY: ends the step before, begins the next.
step() {
    end_step
    STEP=$((STEP + 1)) STEP_NAME=$1 REMEDY=$2 STEP_BEGAN=$SECONDS
    printf '[%d/%d] %s\n' "$STEP" "$STEPS" "$STEP_NAME"
}

end_step() {
    ((STEP == 0)) || printf '    %d s\n' $((SECONDS - STEP_BEGAN))
}

# die REASON [REMEDY]
die() {
    report_failure "$1" "${2:-$REMEDY}"
    exit 1
}

report_failure() {
    REPORTED=1 KEEP_LOG=1
    {
        printf '\nStep %d (%s) failed after %d s: %s\n' "$STEP" "$STEP_NAME" $((SECONDS - STEP_BEGAN)) "$1"
        [[ -z $2 ]] || printf 'What to do: %s\n' "$2"
        [[ ! -s $LOG ]] || printf 'Output of the commands: %s\n' "$LOG"
    } >&2
}

# What a script adds to the end of a run; replaced by scripts/test.
at_exit() { :; }

on_exit() {
    local rc=$1 dir
    trap - ERR EXIT
    set +e
    ((rc == 0)) || [[ -n $REPORTED ]] || {
        case $rc in
            130 | 143) report_failure "stopped by a signal" "start it again; what is done already is kept" ;;
            *) report_failure "${FAILED_AT:-exit code $rc}" "$REMEDY" ;;
        esac
    }
    for dir in "${TEMPS[@]}"; do rm -rf -- "$dir"; done
    [[ -z $LOG || (-n $KEEP_LOG && -s $LOG) ]] || rm -f -- "$LOG"
    at_exit "$rc"
    exit "$rc"
}

# new_temp PARENT: sets TEMP to a new directory that goes when the script ends.
new_temp() {
    mkdir -p "$1"
    TEMP=$(mktemp -d "$1/hearth-script.XXXXXX")
    TEMPS+=("$TEMP")
}

drop_temp() {
    rm -rf -- "$TEMP"
}

# Runs a command with its output in the log; shows the end of it if the command fails.
quietly() {
    local rc=0 from
    from=$(($(wc -l <"$LOG") + 1))
    "$@" >>"$LOG" 2>&1 </dev/null || rc=$?
    ((rc == 0)) || tail -n "+$from" "$LOG" | tail -n 20 | sed 's/^/    | /' >&2
    return "$rc"
}

# ---------------------------------------------------------------- who runs what

# need_root ARGS…: starts the script again by sudo where the caller is not root.
need_root() {
    ((EUID != 0)) || return 0
    local script name keep=() opts=()
    script=$ROOT/scripts/$(basename "$0")
    # Nobody can type a password without a terminal.
    [[ -t 0 ]] || opts=(-n)
    # Asked first: what replaces this script by exec can no longer say how it ended.
    if ! type -P sudo >/dev/null || ! sudo "${opts[@]}" -- true; then
        printf '%s needs root: it installs packages and makes network namespaces.\n' "$script" >&2
        printf 'What to do: run it as root, or install sudo and allow yourself to use it.\n' >&2
        REPORTED=1
        exit 1
    fi
    for name in "${!HEARTH_@}" CI CARGO_TARGET_DIR CARGO_HOME RUSTUP_HOME RUSTUP_DIST_SERVER RUSTUP_UPDATE_ROOT \
        http_proxy https_proxy no_proxy HTTP_PROXY HTTPS_PROXY NO_PROXY; do
        [[ -z ${!name:-} ]] || keep+=("$name=${!name}")
    done
    exec sudo "${opts[@]}" -- env "HEARTH_CALLER_PATH=$PATH" "${keep[@]}" bash "$script" "$@"
}

home_of() { getent passwd "$1" | cut -d: -f6; }

# Sets BUILDER, its home and its group: the owner of the checkout, or the caller where that cannot be.
pick_builder() {
    local owner
    BUILDER=$(id -un)
    owner=$(stat -c %U "$ROOT")
    if ((EUID == 0)) && [[ $owner != root && $owner != UNKNOWN && -d $(home_of "$owner") ]]; then
        BUILDER=$owner
    fi
    BUILDER_HOME=$(home_of "$BUILDER")
    BUILDER_HOME=${BUILDER_HOME:-$HOME}
    BUILD_ENV=()
}

# Runs a command as the builder, with the tool chain found before.
as_builder() {
    if [[ $BUILDER == "$(id -un)" ]]; then
        env "${BUILD_ENV[@]}" "$@"
    else
        runuser -u "$BUILDER" -- env "HOME=$BUILDER_HOME" "USER=$BUILDER" "LOGNAME=$BUILDER" "${BUILD_ENV[@]}" "$@"
    fi
}

# ---------------------------------------------------------------- the machine

check_os() {
    local ID="" VERSION_ID="" VERSION_CODENAME="" PRETTY_NAME="an unknown system"
    [[ $(uname -s) == Linux && $(uname -m) == x86_64 ]] ||
        die "this is $(uname -s) on $(uname -m)" "use a Linux machine with an x86-64 processor"
    # shellcheck source=/dev/null
    [[ ! -r /etc/os-release ]] || . /etc/os-release
    OS_ID=$ID OS_CODENAME=$VERSION_CODENAME
    case $ID:$VERSION_ID in
        debian:12 | debian:13 | ubuntu:22.04 | ubuntu:24.04) ;;
        *)
            [[ ${HEARTH_ANY_OS:-} == 1 ]] || die "$PRETTY_NAME is not Debian 12 or 13, nor Ubuntu 22.04 or 24.04" \
                "use one of these, or set HEARTH_ANY_OS=1 to try anyway (apt is needed)"
            say "not a tested system; going on because HEARTH_ANY_OS=1"
            ;;
    esac
    type -P apt-get >/dev/null || die "there is no apt-get" "use Debian or Ubuntu"
    say "$PRETTY_NAME"
}

# need_space DIR BYTES WHAT
need_space() {
    local dir=$1 free
    until [[ -d $dir ]]; do dir=$(dirname "$dir"); done
    free=$(df --output=avail -B1 "$dir" | tail -n 1)
    ((free >= $2)) || die "$dir has $((free / 1024 / 1024)) MiB free; $3 needs $(($2 / 1024 / 1024)) MiB" \
        "free some space, or name another place ($4)"
}

# check_space STATE_DIR: less is asked for where an earlier run did the work.
check_space() {
    local build=$((6 * GIB)) state=$((2 * GIB))
    [[ ! -x $HEARTH ]] || build=$GIB
    [[ ! -e $1/templates/base ]] || state=$((GIB / 4))
    need_space "$TARGET" "$build" "the build" CARGO_TARGET_DIR
    need_space "$1" "$state" "the guest images" HEARTH_STATE_DIR
}

# ---------------------------------------------------------------- packages

APT_UPDATED=""

apt() {
    DEBIAN_FRONTEND=noninteractive NEEDRESTART_SUSPEND=1 apt-get -q -o DPkg::Lock::Timeout=120 \
        -o Acquire::Retries=2 -o Acquire::http::Timeout=30 "$@"
}

apt_update() {
    [[ -z $APT_UPDATED ]] || return 0
    APT_UPDATED=1
    say "updating the package lists"
    quietly apt update || die "apt-get update failed" \
        "check the network and /etc/apt (a proxy goes into http_proxy); 'apt-get update' must work by itself"
}

# Whether apt has a version of every package to offer.
apt_knows() {
    local package
    for package; do
        [[ $(apt-cache policy "$package" 2>/dev/null) =~ Candidate:\ [^\(] ]] || return 1
    done
}

apt_install() {
    (($# > 0)) || return 0
    apt_knows "$@" || apt_update
    apt_knows "$@" || die "apt offers no $(for p; do apt_knows "$p" || printf '%s ' "$p"; done)" \
        "add the distribution's main (Ubuntu: also universe) archive to /etc/apt"
    say "installing $*"
    quietly apt install -y --no-install-recommends "$@" && return 0
    # The lists may name versions that the archive no longer has.
    apt_update
    quietly apt install -y --no-install-recommends "$@" || die "apt-get install failed" \
        "see the lines above; 'apt-get install $*' must work by itself"
}

# apt_fetch DIR LIST-COMMAND: fetches the packages that LIST-COMMAND puts into PACKAGES, without installing
# them, and unpacks them into DIR/root. The command is asked again after an update of the lists: the archive
# may have moved on to other names.
apt_fetch() {
    local deb
    "$2"
    if ! apt_knows "${PACKAGES[@]}" || ! (cd "$1" && quietly apt download "${PACKAGES[@]}"); then
        apt_update
        "$2"
        (cd "$1" && quietly apt download "${PACKAGES[@]}") || die "apt-get download ${PACKAGES[*]} failed" \
            "check the network; 'apt-get download ${PACKAGES[*]}' must work by itself"
    fi
    for deb in "$1"/*.deb; do dpkg-deb -x "$deb" "$1/root"; done
    rm -f -- "$1"/*.deb
}

# need_command COMMAND PACKAGE: adds to MISSING. A shell builtin of that name is no program.
need_command() {
    type -P "$1" >/dev/null || [[ " ${MISSING[*]} " == *" $2 "* ]] || MISSING+=("$2")
}

# install_packages product|test
install_packages() {
    find_missing "$1"
    if ((${#MISSING[@]} == 0)); then
        say "all there"
        return
    fi
    apt_install "${MISSING[@]}"
    # One that was there may have given way to another of a version that it does not go with.
    find_missing "$1"
    apt_install "${MISSING[@]}"
}

# find_missing product|test: sets MISSING.
find_missing() {
    MISSING=()
    need_command qemu-system-x86_64 qemu-system-x86
    need_command mmdebstrap mmdebstrap
    # mmdebstrap asks it which keyring signs a suite.
    need_command gpg gpg
    need_command mount mount
    need_command mke2fs e2fsprogs
    need_command tar tar
    need_command nft nftables
    need_command runuser util-linux
    need_command cc gcc
    [[ -e $(cc -print-file-name=libc.a 2>/dev/null) ]] || MISSING+=(libc6-dev)
    # Ubuntu does not know the keys of the Debian archive.
    [[ -e /usr/share/keyrings/debian-archive-keyring.gpg ]] || MISSING+=(debian-archive-keyring)
    if [[ $1 == test ]]; then
        # What the tests run besides.
        need_command ip iproute2
        need_command iptables-nft iptables
        need_command iptables-legacy iptables
        need_command kill procps
        need_command nsenter util-linux
        need_command script bsdutils
        need_command e2fsck e2fsprogs
        need_command debugfs e2fsprogs
        need_command cpio cpio
        # Clients of the block server.
        need_command qemu-io qemu-utils
        need_command nbdinfo libnbd-bin
        need_command nbdcopy libnbd-bin
        need_command qemu-img qemu-utils
        need_command fio fio
        need_command shellcheck shellcheck
    fi
}

need_curl() {
    MISSING=()
    need_command curl curl
    [[ -e /etc/ssl/certs/ca-certificates.crt ]] || MISSING+=(ca-certificates)
    apt_install "${MISSING[@]}"
}

# ---------------------------------------------------------------- Rust

# try_cargo DIR: uses the cargo in DIR if it is new enough.
try_cargo() {
    local dir=$1 version home
    [[ -x $dir/cargo ]] || return 1
    BUILD_ENV=("PATH=$dir:$PATH" "CARGO_TARGET_DIR=$TARGET")
    # Downloads of the builder's cargo belong to the builder, whoever the programs are borrowed from.
    if [[ -n ${CARGO_HOME:-} && -O $CARGO_HOME && $BUILDER == "$(id -un)" ]]; then
        BUILD_ENV+=("CARGO_HOME=$CARGO_HOME")
    else
        BUILD_ENV+=("CARGO_HOME=$BUILDER_HOME/.cargo")
    fi
    home=${dir%/.cargo/bin}
    if [[ -n ${RUSTUP_HOME:-} ]]; then
        BUILD_ENV+=("RUSTUP_HOME=$RUSTUP_HOME")
    elif [[ -d $home/.rustup ]]; then
        BUILD_ENV+=("RUSTUP_HOME=$home/.rustup")
    fi
    [[ -z ${2:-} ]] || BUILD_ENV+=("RUSTUP_TOOLCHAIN=$2")
    # The directory may hold a tool chain file that rustup follows.
    version=$(cd "$ROOT" && as_builder cargo --version 2>/dev/null) || return 1
    [[ $version =~ ^cargo\ 1\.([0-9]+) ]] && ((BASH_REMATCH[1] >= MIN_RUST_MINOR)) || return 1
    say "$version in $dir"
}

find_cargo() {
    local dirs dir
    IFS=: read -r -a dirs <<<"$PATH:${HEARTH_CALLER_PATH:-}"
    dirs+=("${CARGO_HOME:-/nowhere}/bin" "$BUILDER_HOME/.cargo/bin")
    [[ -z ${SUDO_USER:-} ]] || dirs+=("$(home_of "$SUDO_USER")/.cargo/bin")
    for dir in "${dirs[@]}"; do
        [[ -n $dir ]] || continue
        ! try_cargo "$dir" || return 0
    done
    return 1
}

install_rust() {
    local hint="install Rust 1.$MIN_RUST_MINOR or newer by other means and put cargo into PATH, then start again"
    ! find_cargo || return 0
    local bin=$BUILDER_HOME/.cargo/bin
    if [[ -x $bin/rustup ]]; then
        say "the Rust here is older than 1.$MIN_RUST_MINOR; installing the stable one beside it"
        BUILD_ENV=("PATH=$bin:$PATH")
        quietly as_builder rustup toolchain install stable --profile minimal || die "rustup failed" "$hint"
        try_cargo "$bin" stable || die "rustup's stable tool chain does not work" "$hint"
        return 0
    fi
    need_curl
    say "installing Rust with rustup for $BUILDER (shell profiles are left alone)"
    new_temp "${TMPDIR:-/tmp}"
    quietly curl --proto '=https' --tlsv1.2 --fail --silent --show-error --location --connect-timeout 20 \
        --max-time 300 --output "$TEMP/rustup-init.sh" https://sh.rustup.rs || die "rustup cannot be downloaded" "$hint"
    chmod 755 "$TEMP"
    BUILD_ENV=()
    quietly as_builder sh "$TEMP/rustup-init.sh" -y --profile minimal --no-modify-path || die "rustup failed" "$hint"
    drop_temp
    try_cargo "$bin" || die "cargo does not work after rustup ran" "$hint"
}

# clippy and rustfmt, where rustup can bring them; `cargo xtask check` says so otherwise.
install_rust_components() {
    if as_builder cargo clippy --version >/dev/null 2>&1 && as_builder cargo fmt --version >/dev/null 2>&1; then
        return 0
    fi
    as_builder rustup --version >/dev/null 2>&1 || return 0
    quietly as_builder rustup component add clippy rustfmt || say "clippy or rustfmt cannot be had"
}

# cargo ARGS… in the checkout, as the builder.
cargo_here() { (cd "$ROOT" && as_builder cargo "$@"); }

# Refuses a target directory that the builder cannot write, as a `sudo cargo` leaves it.
check_target() {
    as_builder mkdir -p "$TARGET" 2>/dev/null || die "$BUILDER cannot make $TARGET" "set CARGO_TARGET_DIR"
    local foreign
    foreign=$(find "$TARGET" -maxdepth 3 -path "$TARGET/test-state" -prune -o ! -user "$BUILDER" -print -quit)
    [[ -z $foreign || $BUILDER == root ]] || die "$foreign does not belong to $BUILDER" \
        "sudo chown -R $BUILDER: $TARGET"
}

build_product() {
    check_target
    if [[ ${HEARTH_TEST_PROFILE:-release} == dev ]]; then
        # With the tests: alone it would be built with other features, and so twice.
        cargo_here test --workspace --locked --no-run </dev/null
        # The guest's is small in any case: it is unpacked into the memory of each guest.
        cargo_here build --release --locked -p hearth-guest </dev/null
    else
        cargo_here build --release --locked -p hearth -p hearth-guest </dev/null
    fi
    [[ -x $HEARTH && -x $GUEST_BIN ]] || die "the build made no $HEARTH and $GUEST_BIN" \
        "unset build.target overrides in your cargo configuration"
}

# ---------------------------------------------------------------- virtual machine monitor

# KVM counts only where the processor has it and the device opens; a device node alone may be useless.
kvm_usable() {
    grep -qwE 'vmx|svm' /proc/cpuinfo && [[ -r /dev/kvm && -w /dev/kvm ]]
}

prepare_vmm() {
    if [[ -n ${HEARTH_FIRECRACKER:-} ]]; then
        [[ -x $HEARTH_FIRECRACKER ]] || die "HEARTH_FIRECRACKER=$HEARTH_FIRECRACKER is no program" "unset it"
        export HEARTH_FIRECRACKER
        say "firecracker: $HEARTH_FIRECRACKER"
    elif type -P firecracker >/dev/null; then
        say "firecracker: $(type -P firecracker)"
    elif kvm_usable; then
        install_firecracker || say "Firecracker cannot be downloaded; using qemu with KVM"
        return 0
    fi
    kvm_usable || say "no usable KVM: using qemu with plain emulation (slower, works everywhere)"
}

install_firecracker() {
    local base=https://github.com/firecracker-microvm/firecracker/releases/download/$FIRECRACKER_RELEASE
    local name=firecracker-$FIRECRACKER_RELEASE-x86_64
    local get=(curl --fail --silent --show-error --location --connect-timeout 10 --max-time 120)
    need_curl
    new_temp "${TMPDIR:-/tmp}"
    "${get[@]}" -o "$TEMP/$name.tgz" "$base/$name.tgz" >>"$LOG" 2>&1 || return 1
    "${get[@]}" -o "$TEMP/$name.tgz.sha256.txt" "$base/$name.tgz.sha256.txt" >>"$LOG" 2>&1 || return 1
    (cd "$TEMP" && sha256sum --check --status "$name.tgz.sha256.txt") || {
        say "the checksum of $name.tgz is wrong; not used"
        return 1
    }
    tar -xzf "$TEMP/$name.tgz" -C "$TEMP" "release-$FIRECRACKER_RELEASE-x86_64/$name" || return 1
    install -m 0755 "$TEMP/release-$FIRECRACKER_RELEASE-x86_64/$name" /usr/local/bin/firecracker || return 1
    drop_temp
    say "firecracker $FIRECRACKER_RELEASE: /usr/local/bin/firecracker"
}

# ---------------------------------------------------------------- guest kernel and templates

# hearth ARGS…: the binary just built, on STATE_DIR and RUN_DIR, bounded in time.
hearth() {
    HEARTH_STATE_DIR=$STATE_DIR HEARTH_RUN_DIR=$RUN_DIR HEARTH_GUEST=$GUEST_BIN \
        timeout --foreground --kill-after=15 "${LIMIT:-15m}" "$HEARTH" "$@"
}

# must_hearth ARGS…: the same, and its failure is the step's.
must_hearth() { hearth "$@" || die "'hearth $1 $2' ended with exit code $?"; }

# has NAME LIST-COMMAND…: whether the JSON list has an entry of that name.
has() {
    local name=$1 json
    shift
    json=$(hearth "$@" --json) || die "'hearth $* --json' failed"
    [[ $json =~ \"name\":[[:space:]]*\"$name\" ]]
}

# Sets META to the package that stands for the archive's newest kernel for virtual machines.
kernel_meta() {
    for META in linux-image-cloud-amd64 linux-image-virtual; do
        ! apt_knows "$META" || return 0
    done
    return 1
}

# The concrete packages behind it.
kernel_packages() {
    local image META
    # Without lists apt knows neither Debian's nor Ubuntu's.
    kernel_meta || { apt_update && kernel_meta; } ||
        die "apt offers no kernel for virtual machines (linux-image-cloud-amd64, linux-image-virtual)" \
            "add the distribution's main archive to /etc/apt"
    image=$(apt-cache depends "$META" 2>/dev/null | sed -n 's/^ *Depends: \(linux-image-[0-9].*\)$/\1/p')
    image=${image%%$'\n'*}
    [[ -n $image ]] || die "apt names no kernel for virtual machines" "run 'apt-get update' and look at /etc/apt"
    PACKAGES=("$image")
    # Ubuntu ships the modules apart.
    [[ $META != linux-image-virtual ]] || PACKAGES+=("linux-modules-${image#linux-image-}")
}

prepare_kernel() {
    if has default kernel ls; then
        say "already there"
        return 0
    fi
    local image modules
    say "downloading the distribution's kernel for virtual machines (not installed on this machine)"
    new_temp "$STATE_DIR/tmp"
    apt_fetch "$TEMP" kernel_packages
    image=$(find "$TEMP/root/boot" -name 'vmlinuz-*' -print -quit)
    [[ -n $image ]] || die "no vmlinuz in ${PACKAGES[*]}"
    modules=$(find "$TEMP/root" -type d -path "*/lib/modules/${image##*/vmlinuz-}" -print -quit)
    [[ -n $modules ]] || die "no modules in ${PACKAGES[*]}"
    must_hearth kernel import default --image "$image" --modules "$modules"
    drop_temp
}

busybox_packages() { PACKAGES=(busybox-static); }

# Sets BUSYBOX to the static one, in TEMP if it has to be fetched.
find_busybox() {
    if [[ $(dpkg-query -W -f '${db:Status-Status}' busybox-static 2>/dev/null) == installed ]]; then
        BUSYBOX=$(type -P busybox || true)
    else
        # Not installed: it would replace the machine's own busybox.
        apt_fetch "$TEMP" busybox_packages
        BUSYBOX=$(find "$TEMP/root" -type f -path "*/bin/busybox" -print -quit)
    fi
    [[ -n $BUSYBOX ]] || die "no busybox in the package busybox-static"
}

# keep_busybox FILE: a static busybox for programs outside guests, at a place that stays.
keep_busybox() {
    [[ ! -x $1 ]] || return 0
    new_temp "$STATE_DIR/tmp"
    find_busybox
    mkdir -p "$(dirname "$1")"
    install -m 0755 "$BUSYBOX" "$1.new"
    mv "$1.new" "$1"
    drop_temp
}

# A root directory with busybox alone and a link per applet.
prepare_busybox() {
    if has busybox template ls; then
        say "already there"
        return 0
    fi
    local applet root
    new_temp "$STATE_DIR/tmp"
    find_busybox
    root=$TEMP/template
    mkdir -p "$root"/{bin,dev,etc,proc,root,run,sys,tmp,usr,var}
    chmod 755 "$TEMP" "$root"
    chmod 1777 "$root/tmp"
    cp "$BUSYBOX" "$root/bin/busybox"
    "$BUSYBOX" --list | while read -r applet; do
        [[ $applet == busybox ]] || ln -s busybox "$root/bin/$applet"
    done
    ln -s ../bin "$root/usr/bin"
    ln -s bin "$root/sbin"
    printf 'root:x:0:0:root:/root:/bin/sh\nnobody:x:65534:65534:nobody:/:/bin/false\n' >"$root/etc/passwd"
    printf 'root:x:0:\nnogroup:x:65534:\n' >"$root/etc/group"
    must_hearth template create busybox --dir "$root"
    drop_temp
}

prepare_base() {
    local suite=bookworm
    if has base template ls; then
        say "already there"
        return 0
    fi
    [[ $OS_ID != debian || -z $OS_CODENAME ]] || suite=$OS_CODENAME
    say "a Debian $suite with python3; one to three minutes"
    must_hearth template create base --debian "$suite" --include python3
}

# ---------------------------------------------------------------- inventory

# The one thing that stays on purpose: /run/netns becomes a mount point of its own the first time a namespace is
# bound there, just as `ip netns add` makes it. It is constant, shared with iproute2, and gone after a reboot.
NETNS_MOUNT="mount /run/netns"

# Prints, one a line and sorted, every trace hearth or a test of it could leave on this machine. Counts by name
# alone are enough here: the list is only compared with itself, nothing is removed by it.
inventory() {
    {
        printf 'setting net.ipv4.ip_forward = %s\n' "$(cat /proc/sys/net/ipv4/ip_forward)"
        # The tests' own: namespaces htest-*, links hxv*, directories /tmp/hx??????.
        find /run/netns -mindepth 1 \( -name 'hearth-*' -o -name 'htest-*' \) -printf 'namespace %p\n' 2>/dev/null || true
        find /sys/class/net -mindepth 1 \( -name 'hth*' -o -name 'hts[0-9]v*' -o -name 'hxv*' \) \
            -printf 'link %f\n' 2>/dev/null || true
        nft list ruleset 2>/dev/null | sed -n 's/^[[:space:]]*\(.*hearth.*\)$/firewall \1/p' || true
        # Without a legacy table the program would load one.
        if [[ -s /proc/net/ip_tables_names ]] && command -v iptables-legacy-save >/dev/null; then
            iptables-legacy-save 2>/dev/null | sed -n 's/^\(.*hearth.*\)$/firewall \1/p' || true
        fi
        sed -n "s|^[^ ]* [^ ]* [^ ]* [^ ]* \([^ ]*\) .*|\1|p" /proc/self/mountinfo |
            grep -e /hearth -e '^/run/netns$' -e '^/run/netns/htest-' -e "^$RUN_DIR/" -e "^$STATE_DIR/" | sed 's/^/mount /' || true
        find /sys/fs/cgroup -type d -path '*/hearth*' -printf 'cgroup %p\n' 2>/dev/null || true
        find "$RUN_DIR" -printf 'file %p\n' 2>/dev/null || true
        find /tmp /var/tmp /run -mindepth 1 -maxdepth 1 \( -name '*hearth*' -o -name 'hx??????' \) -printf 'file %p\n' 2>/dev/null || true
        # Saved firewall rules stay on purpose; there are never more than a few.
        # Empty disks are made once for each size, their directory with the first; what was read of remote disks is
        # kept in a cache of a bounded size.
        find "$STATE_DIR" \( -path "$STATE_DIR/templates/*" -o -path "$STATE_DIR/kernels/*" -o -path "$STATE_DIR/backups" \
            -o -path "$STATE_DIR/blanks/*.ext4" -o -path "$STATE_DIR/chunks" \) -prune \
            -o ! -path "$STATE_DIR/blanks" -printf 'file %p\n' 2>/dev/null || true
        inventory_processes
    } | sort -u
}

# Our programs by name; a VMM only when its cgroup or its arguments point to us.
inventory_processes() {
    local dir comm line
    for dir in /proc/[0-9]*; do
        { read -r comm <"$dir/comm"; } 2>/dev/null || continue
        case $comm in
            hearth | hearth-* | hearth:*) ;;
            qemu-system* | firecracker*)
                line=$({ tr '\0' ' ' <"$dir/cmdline"; cat "$dir/cgroup"; } 2>/dev/null) || continue
                [[ $line == *hearth* || $line == *"$RUN_DIR"* || $line == *"$STATE_DIR"* ]] || continue
                ;;
            *) continue ;;
        esac
        printf 'process %s (%s)\n' "$comm" "${dir#/proc/}"
    done
}

# differences BEFORE AFTER: prints them; false if there are any but NETNS_MOUNT.
differences() {
    local new gone
    new=$(comm -13 <(printf '%s\n' "$1") <(printf '%s\n' "$2"))
    if grep -qxF "$NETNS_MOUNT" <<<"$new"; then
        new=$(grep -vxF "$NETNS_MOUNT" <<<"$new" || true)
        say "stays on purpose: $NETNS_MOUNT, as 'ip netns add' makes it; constant, gone after a reboot"
    fi
    gone=$(comm -23 <(printf '%s\n' "$1") <(printf '%s\n' "$2"))
    [[ -n $new$gone ]] || return 0
    [[ -z $new ]] || printf '%s\n' "$new" | sed 's/^/    left behind: /'
    [[ -z $gone ]] || printf '%s\n' "$gone" | sed 's/^/    was there before, now gone: /'
    return 1
}
