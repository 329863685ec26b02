{{/* The embedded Valkey: a cache in memory, so nothing is written to disk and the oldest blocks make room. */}}
{{- define "spillway.redisFiles" -}}
{{- $redis := .Values.redis -}}
{{- $memory := int64 (include "spillway.bytes" (dict "value" $redis.memory "path" "redis.memory" "problems" dict)) -}}
valkey.conf: |
  bind * -::*
  port {{ int64 $redis.port }}
  # A quarter of the pod stays free: fragmentation and buffers of clients that read whole chunks.
  maxmemory {{ div (mul $memory 3) 4 }}
  maxmemory-policy allkeys-lru
  io-threads {{ int64 $redis.ioThreads }}
  save ""
  appendonly no
  dir /tmp
{{- if $redis.existingSecret.name }}
  include /tmp/password.conf
{{- else }}
  protected-mode no
{{- end }}
start.sh: |
  set -eu
{{- if $redis.existingSecret.name }}
  # The password goes from the environment into a file in memory, never into an argument.
  umask 077
  printf 'requirepass "%s"\n' "$VALKEY_PASSWORD" > /tmp/password.conf
  unset VALKEY_PASSWORD
{{- end }}
  exec valkey-server /etc/valkey/valkey.conf
{{- end -}}
