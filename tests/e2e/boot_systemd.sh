#!/bin/bash
# Boots this system's systemd as process 1 of its own namespaces, over an overlay of / whose changes
# are forgotten. Usage: boot_systemd.sh FOLDER GROUP MODEL PATH... (paths to show inside if they are
# on other file systems). What happens outside: files in FOLDER, the control group GROUP.
set -euo pipefail
folder=$1 group=$2 model=$3
root=$folder/root
if [[ ${STAGE-} != 2 ]]; then
    mount --make-rprivate /
    mkdir "$folder/cgroup"
    mount -t cgroup2 cgroup2 "$folder/cgroup"
    mkdir "$folder/cgroup/$group"
    echo $$ >"$folder/cgroup/$group/cgroup.procs"
    STAGE=2 exec unshare --pid --fork --kill-child --mount --uts --ipc --net --cgroup "$0" "$@"
fi
shift 3
mkdir "$folder/changes" "$root"
mount -t tmpfs tmpfs "$folder/changes"
mkdir "$folder/changes/upper" "$folder/changes/work"
mount -t overlay overlay "$root" \
    -o "lowerdir=/,upperdir=$folder/changes/upper,workdir=$folder/changes/work"
for path in "$@"; do
    if [[ ! -e $root$path ]]; then
        mkdir -p "$root$path"
        mount --rbind "$path" "$root$path"
    fi
done
mount -t proc proc "$root/proc"
mount --bind "$root/proc/sys" "$root/proc/sys"
mount -o remount,bind,ro "$root/proc/sys"
mount -t sysfs -o ro sysfs "$root/sys" || mount --bind /sys "$root/sys"
mount -t cgroup2 cgroup2 "$root/sys/fs/cgroup"
mount -t tmpfs tmpfs "$root/run"
mount -t tmpfs tmpfs "$root/dev" -o mode=755
for node in null zero full random urandom tty; do
    touch "$root/dev/$node"
    mount --bind "/dev/$node" "$root/dev/$node"
done
mkdir "$root/dev/shm" "$root/dev/pts"
mount -t tmpfs tmpfs "$root/dev/shm" -o mode=1777
mount -t devpts devpts "$root/dev/pts" -o newinstance,ptmxmode=666
ln -s pts/ptmx "$root/dev/ptmx"
ln -s /proc/self/fd "$root/dev/fd"

# No service of this system but the ones under test and the journal.
units=$root/etc/systemd/system
rm -rf "$units" "$root"/usr/lib/systemd/system/{sysinit,basic,multi-user}.target.wants
mkdir -p "$units/test.target.wants"
for target in test sysinit basic network-online; do
    printf '[Unit]\nDescription=%s\nDefaultDependencies=no\n' $target >"$units/$target.target"
done
ln -s /usr/lib/systemd/system/systemd-journald.service "$units/test.target.wants/"
: >"$root/etc/fstab"
: >"$root/etc/machine-id"
rm -rf "$root/etc/deepinfer"
cp -r "$model" "$root/srv/model"
chmod -R a+rX "$root/srv"
# The user of the service has to reach the Python environment, which may be root's.
for path in "$@"; do
    while [[ $path != / ]]; do
        [[ -x $path ]] && chmod a+rx "$root$path"
        path=$(dirname "$path")
    done
done
cd "$root"
mkdir -p mnt/outside
pivot_root . mnt/outside
umount -l /mnt/outside
exec env -i container=test PATH="$PATH" /usr/lib/systemd/systemd --unit=test.target \
    --log-target=console --show-status=no
