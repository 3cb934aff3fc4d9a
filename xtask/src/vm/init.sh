#!/bin/busybox sh
# The guest's first process: loads the modules, lays a writable layer over the host's root, and goes
# there. A failure ends it, and with it the machine; what it prints is on the console, which the
# host shows then.
/bin/busybox mkdir -p /bin /proc /sys /dev /host /layer /root
/bin/busybox --install -s /bin
mount -t proc proc /proc && mount -t sysfs sysfs /sys && mount -t devtmpfs dev /dev || exit 1
while read -r module; do
    insmod "/modules/$module" || exit 1
done </modules/order
mount -t 9p -o ro,trans=virtio,version=9p2000.L,msize=512000,cache=loose host /host || exit 1
mount -t tmpfs -o size=75% layer /layer && mkdir /layer/upper /layer/work || exit 1
mount -t overlay -o lowerdir=/host,upperdir=/layer/upper,workdir=/layer/work root /root || exit 1
mount -t tmpfs -o mode=755 run /root/run || exit 1
mv /guest /root/run/guest || exit 1
for system in proc sys dev; do
    mount --move "/$system" "/root/$system" || exit 1
done
exec switch_root /root /bin/sh /run/guest/run.sh
