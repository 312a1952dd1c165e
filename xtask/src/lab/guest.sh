#!/bin/sh
# Init of the lab: makes the machine what a host of hearth is, runs the suite, writes what became of it to the third
# disk and turns the machine off. Standard output is the kernel's console; what people follow goes to the second
# serial port.
set -u
export PATH=/lab/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin HOME=/root TERM=dumb LC_ALL=C.UTF-8

mount -t proc proc /proc
mount -t sysfs sys /sys
mount -t tmpfs run /run
mount -t tmpfs tmp /tmp
mkdir -p /dev/pts /dev/shm
mount -t devpts pts /dev/pts
mount -t tmpfs shm /dev/shm
mount -t cgroup2 cgroup2 /sys/fs/cgroup
read -r controllers </sys/fs/cgroup/cgroup.controllers
for controller in $controllers; do
    echo "+$controller" >/sys/fs/cgroup/cgroup.subtree_control
done
# As on a machine that systemd booted.
mount --make-rshared /
hostname lab
ip link set lo up

# Followed from a file, not through a pipe: a process that a test left behind would hold a pipe open for ever.
result=/run/result
log=/run/log
mkdir -p $result
: >$log
stty -F /dev/ttyS1 raw
exec >>$log 2>&1

for module in nbd kvm_amd tun veth nf_tables overlay; do
    modprobe $module || echo "lab: no module $module"
done
echo "lab: Linux $(uname -r), up after $(cut -d ' ' -f 1 /proc/uptime) s"

export HEARTH_BIN=/lab/bin/hearth HEARTH_GUEST=/lab/bin/hearth-guest HEARTH_TEST_STATE=/lab/state
export HEARTH_TEST_BUSYBOX=/bin/busybox
[ ! -e /lab/bin/firecracker ] || export HEARTH_FIRECRACKER=/lab/bin/firecracker

# The kernel and the template that tests expect: this very kernel, and busybox alone.
prepare_state() {
    template=/tmp/template
    mkdir -p $template/bin $template/dev $template/etc $template/proc $template/root $template/run $template/sys \
        $template/tmp $template/usr $template/var
    cp /bin/busybox $template/bin/
    for applet in $(busybox --list); do
        [ "$applet" = busybox ] || ln -s busybox "$template/bin/$applet"
    done
    ln -s ../bin $template/usr/bin
    ln -s bin $template/sbin
    echo 'root:x:0:0:root:/root:/bin/sh' >$template/etc/passwd
    echo 'root:x:0:' >$template/etc/group
    HEARTH_STATE_DIR=$HEARTH_TEST_STATE hearth kernel import default --image /lab/vmlinuz \
        --modules "/lib/modules/$(uname -r)" &&
        HEARTH_STATE_DIR=$HEARTH_TEST_STATE hearth template create busybox --dir $template
    rc=$?
    rm -rf $template
    return $rc
}

# A command as an operator gives it: without what concerns tests only, which the product would remark on.
run_command() {
    env -u HEARTH_BIN -u HEARTH_TEST_STATE -u HEARTH_TEST_BUSYBOX -u HEARTH_SKIP_LOG -u HEARTH_REPORT \
        "HEARTH_STATE_DIR=$HEARTH_TEST_STATE" sh -c "$1"
}

# item NUMBER NAME PROGRAM ARGS…: one part of the suite, with output and skips of its own.
item() {
    number=$1 name=$2
    shift 2
    printf '\nlab: %s\n' "$name"
    began=$(cut -d . -f 1 /proc/uptime)
    from=$(wc -c <$log)
    HEARTH_SKIP_LOG=$result/skips.$number HEARTH_REPORT=$result/notes.$number "$@"
    code=$?
    tail -c "+$((from + 1))" $log >"$result/output.$number"
    echo "$number $code $(($(cut -d . -f 1 /proc/uptime) - began))" >>$result/items
}

# The suite is one item a line.
(
    cd /tmp || exit
    # shellcheck source=/dev/null
    . /lab/suite
) </dev/null &
suite=$!
tail -n +1 -s 0.2 -f --pid=$suite $log >/dev/ttyS1 2>/dev/null &
tail=$!
wait $suite
wait $tail
dmesg >$result/dmesg
tar -cf /dev/nvme0n3 -C $result .
sync
busybox poweroff -f
