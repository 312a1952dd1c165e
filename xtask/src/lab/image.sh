#!/bin/sh
# Makes the lab's kernel and root disk out of a fresh Debian tree. mmdebstrap runs it as a hook, outside the tree:
# $1 is the tree, and what it leaves in there as lab.ext4 and lab.vmlinuz is fetched.
set -eu
tree=$1
export APT_CONFIG="$MMDEBSTRAP_APT_CONFIG"

# The kernel is unpacked, not installed: installing makes an initramfs, which takes a minute and is not needed, since
# the drivers of disk (NVMe), file system and serial port are built in.
mkdir "$tree/tmp/kernel"
cd "$tree/tmp/kernel"
package=$(apt-cache depends linux-image-cloud-amd64 | sed -n 's/^ *Depends: \(linux-image-[0-9].*\)$/\1/p' | head -n 1)
apt-get -q -o APT::Sandbox::User=root download "$package"
dpkg-deb -x ./*.deb .
version=$(basename boot/vmlinuz-*)
version=${version#vmlinuz-}
mv "boot/vmlinuz-$version" "$tree/lab.vmlinuz"
# In /usr since Debian 13.
for modules in lib/modules usr/lib/modules; do
    [ ! -d "$modules" ] || cp -a "$modules" "$tree/usr/lib/"
done
cd /
rm -rf "$tree/tmp/kernel"
chroot "$tree" depmod "$version"

# Everything else that init does comes with the payload, so that it can change without a new image.
cat >"$tree/lab-init" <<'INIT'
#!/bin/sh
mount -t devtmpfs dev /dev
mount -t ext4 /dev/nvme0n2 /lab
exec /lab/init
INIT
chmod 755 "$tree/lab-init"
mkdir "$tree/lab"

# A copy without what is mounted in the tree at this moment (/proc, /sys). Beside the tree: it is the one place that
# a hook can write whoever runs it.
copy=$tree.copy
trap 'rm -rf "$copy" "$copy.ext4"' EXIT
mkdir "$copy"
cp -ax "$tree/." "$copy/"
rm -rf "$copy/lab.vmlinuz" "$copy"/var/cache/apt/* "$copy"/var/lib/apt/lists/*
mke2fs -q -t ext4 -O ^has_journal -m 0 -d "$copy" "$copy.ext4" "$(($(du -sm "$copy" | cut -f 1) * 5 / 4 + 128))M"
mv "$copy.ext4" "$tree/lab.ext4"
