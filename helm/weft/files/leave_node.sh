# Runs before a pod ends. $1: the seconds in which requests may end; $2: the seconds until the container is killed.
#
# It tells Ray that this node goes. Serve then starts other replicas where there is room, and stops those here in time for
# them to finish their requests; new requests are planned elsewhere as soon as a replica stops. The script ends with the
# last replica. If Ray does not answer, because the whole cluster is being deleted, the requests just have their time.
if timeout 20 ray drain-node --address auto --reason DRAIN_NODE_REASON_PREEMPTION \
  --reason-message "the pod ends" --deadline-remaining-seconds "$(($2 - 10))" >/proc/1/fd/1 2>&1; then
  # The brackets keep grep from finding itself.
  while grep -qs 'Serve[R]eplica' /proc/[0-9]*/cmdline; do
    sleep 1
  done
else
  sleep "$1"
fi
