# Runs in the guest on the host's root: makes the RDMA devices, runs the command, reports its
# status, ends the machine. What it says on the port `report`: `ready`, then `exit STATUS`; or
# `failed`, with the reason on the port `err`.
export PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin HOME=/root
. /run/guest/settings
mkdir -p /dev/pts /dev/shm
mount -t devpts devpts /dev/pts
mount -t tmpfs -o mode=1777 shm /dev/shm
for port in /sys/class/virtio-ports/*; do
    read -r name <"$port/name"
    eval "$name=/dev/${port##*/}"
done

# Hosts are network namespaces with an RDMA device each, joined by a bridge: host1 has 10.97.0.1.
# Its end of the cable is to-host1: `ip link set to-host1 down` cuts it.
(
    set -e
    linux=$(uname -r)
    if [ "$HOSTS" -gt 0 ] && [ "${linux%%.*}" -lt 7 ]; then
        # Devices can be made there, but what they receive goes astray.
        echo "hosts need Linux 7, and this is $linux: use \`--hosts 0\` or another suite" >&2
        exit 1
    fi
    hostname vm
    ip link set lo up
    ip link add roce0 mtu 9000 type dummy
    ip addr add 10.99.0.1/24 dev roce0
    ip link set roce0 up
    rdma link add rxe0 type rxe netdev roce0
    ip link add bridge mtu 9000 type bridge
    ip link set bridge up
    host=0
    while [ "$host" -lt "$HOSTS" ]; do
        host=$((host + 1))
        ip netns add "host$host"
        ip link add "to-host$host" mtu 9000 type veth peer name eth0 mtu 9000 netns "host$host"
        ip link set "to-host$host" master bridge up
        ip -n "host$host" link set lo up
        ip -n "host$host" addr add "10.97.0.$host/24" dev eth0
        ip -n "host$host" link set eth0 up
        ip netns exec "host$host" rdma link add "rxe$host" type rxe netdev eth0
    done
) >"$err" 2>&1 </dev/null
if [ $? -eq 0 ]; then
    echo ready >"$report"
    ulimit -l unlimited
    ulimit -n 65536
    export FARPAGE_TEST_RDMA_ADDRESS=10.99.0.1 FARPAGE_TEST_HOSTS="$HOSTS"
    /bin/sh /run/guest/command >"$out" 2>"$err" </dev/null
    echo "exit $?" >"$report"
else
    echo failed >"$report"
fi
echo b >/proc/sysrq-trigger
sleep 60
