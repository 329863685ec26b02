#!/bin/bash
# Ascend images complete their environment only in root's login shell. This does the same and then becomes the engine
# service, so that Kubernetes' signals reach it and not a shell.
set -eu

for script in \
  /usr/local/Ascend/ascend-toolkit/set_env.sh \
  /usr/local/Ascend/cann/set_env.sh \
  /usr/local/Ascend/nnal/atb/set_env.sh; do
  if [ -r "$script" ]; then
    set +eu # these scripts read variables that are not set
    # shellcheck disable=SC1090
    . "$script"
    set -eu
  fi
done

for allocator in /usr/lib/"$(uname -m)"-linux-gnu/libjemalloc.so.2 /usr/lib64/libjemalloc.so.2; do
  if [ -r "$allocator" ]; then
    export LD_PRELOAD="$allocator${LD_PRELOAD:+:$LD_PRELOAD}"
    break
  fi
done

case "${SPILLWAY_VISIBLE_DEVICES:-plugin}" in
  copy)
    if [ -z "${ASCEND_VISIBLE_DEVICES:-}" ]; then
      echo "engine.accelerator.visibleDevices.mode: copy, but the device plugin set no ASCEND_VISIBLE_DEVICES;" \
        "set the mode to plugin" >&2
      exit 2
    fi
    export ASCEND_RT_VISIBLE_DEVICES="$ASCEND_VISIBLE_DEVICES"
    ;;
  unset) unset ASCEND_RT_VISIBLE_DEVICES ;;
esac

exec python3 -m spillway_engine "$@"
