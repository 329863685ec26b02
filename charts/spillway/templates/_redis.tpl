{{/* The ACL of its only user, by docs/formats.md: the commands of a tier and of `spillway tier`. */}}
{{- define "spillway.redisRules" -}}
{{- $commands := list "ping" "select" "exists" "touch" "get" "getex" "set" "pexpire" "unlink" "info" "zadd"
  "zrem" "zcard" "zrange" "zremrangebyscore" "scan" "dbsize" "getrange" "strlen" "pttl" "client|no-touch" -}}
resetkeys ~spillway1:* resetchannels -@all +{{ join " +" $commands }}
{{- end -}}

{{/* The embedded Valkey: a cache in memory, so nothing is written to disk and the oldest blocks make room. */}}
{{- define "spillway.redisFiles" -}}
{{- $redis := .Values.redis -}}
valkey.conf: |
  bind * -::*
  port {{ int64 $redis.port }}
  # A quarter of the pod stays free: fragmentation and buffers of clients that read whole chunks.
  maxmemory {{ include "spillway.redisBlockBytes" . }}
  maxmemory-policy allkeys-lru
  io-threads {{ int64 $redis.ioThreads }}
  save ""
  appendonly no
  dir /tmp
{{- if $redis.existingSecret.name }}
  include /tmp/user.conf
{{- else }}
  user default on nopass {{ include "spillway.redisRules" . }}
  protected-mode no
{{- end }}
start.sh: |
  set -eu
{{- if $redis.existingSecret.name }}
  # The password's hash goes from the environment into a file in memory, never into an argument.
  umask 077
  # Without the newline that an editor leaves behind it: engines strip it too.
  password=$(printf %s "$VALKEY_PASSWORD")
  password=${password%"$(printf '\r')"}
  hash=$(printf %s "$password" | sha256sum)
  printf 'user default on #%s %s\n' "${hash%% *}" '{{ include "spillway.redisRules" . }}' > /tmp/user.conf
  unset VALKEY_PASSWORD password hash
{{- end }}
  exec valkey-server {{ .spillwayNames.folders.valkey }}/valkey.conf
{{- end -}}
