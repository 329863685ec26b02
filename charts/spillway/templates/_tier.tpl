{{/* The shared tier: from values to what the engine service reads, and the Secrets that become files in its pod. */}}

{{/* The embedded Valkey's address. */}}
{{- define "spillway.redisUrl" -}}
{{- $host := include "spillway.name" (dict "root" . "suffix" "redis") -}}
redis://{{ $host }}.{{ include "spillway.namespace" . }}.svc.{{ .Values.clusterDomain }}:
{{- int64 .Values.redis.port }}/0
{{- end -}}

{{/* (root, tier, out): the Secret with the engines' login: name, usernameKey, passwordKey, passwordAs. */}}
{{- define "spillway.redisSecret" -}}
{{- $secret := .tier.redis.existingSecret -}}
{{- if and (not $secret.name) (not .tier.redis.url) .root.Values.redis.enabled -}}
{{- $own := .root.Values.redis.existingSecret -}}
{{- $secret = dict "name" $own.name "usernameKey" "" "passwordKey" $own.passwordKey "passwordAs" $secret.passwordAs -}}
{{- end -}}
{{- include "spillway.overlay" (dict "base" .out "over" $secret) -}}
{{- end -}}

{{/* item -> bytes that all engines on the folder may store; nothing: what the file system gives. Nine tenths of a
volume's size: kubelet counts folders and files being written too, and evicts a pod whose emptyDir grows beyond it. */}}
{{- define "spillway.nvmeMaxBytes" -}}
{{- $nvme := .item.engine.offload.sharedTier.nvme -}}
{{- $at := printf "%s.offload.sharedTier.nvme" .item.path -}}
{{- if $nvme.maxBytes -}}
{{- include "spillway.bytes" (dict "value" $nvme.maxBytes "path" (printf "%s.maxBytes" $at)) -}}
{{- else if has $nvme.volume.type (list "emptyDir" "perPodClaim" "sharedClaim") -}}
{{- $size := include "spillway.bytes" (dict "value" $nvme.volume.size "path" (printf "%s.volume.size" $at)) -}}
{{- div (mul (int64 $size) 9) 10 -}}
{{- end -}}{{- end -}}

{{/* (root, item, out): fills out with the engine service's offload.sharedTier, and sets item.secretFiles and
item.redisSecret. */}}
{{- define "spillway.tierSettings" -}}
{{- $tier := .item.engine.offload.sharedTier -}}{{- $item := .item -}}{{- $out := .out -}}
{{- $names := $item.names -}}
{{- $folder := $names.folders.secrets -}}{{- $files := list -}}
{{- $_ := set $out "type" $tier.type -}}{{- if ne $tier.type "none" -}}
{{- include "spillway.passed" (dict "section" (omit $tier "below" "nvme" "redis" "s3" "encryption") "out" $out) -}}
{{- if ne $tier.below.type "none" -}}{{- $below := dict -}}{{- $_ := set $out "below" $below -}}
{{- include "spillway.passed" (dict "section" $tier.below "out" $below) -}}{{- end -}}
{{- end -}}
{{- $types := list $tier.type $tier.below.type -}}
{{- if has "nvme" $types -}}
{{- $nvme := dict -}}
{{- include "spillway.passed" (dict "section" (omit $tier.nvme "volume") "out" $nvme) -}}
{{- with include "spillway.nvmeMaxBytes" (dict "item" $item) -}}{{- $_ := set $nvme "maxBytes" (int64 .) -}}{{- end -}}
{{- $_ = set $out "nvme" $nvme -}}
{{- end -}}{{- if has "redis" $types -}}
{{- $url := $tier.redis.url -}}
{{- if and (not $url) .root.Values.redis.enabled -}}{{- $url = include "spillway.redisUrl" .root -}}{{- end -}}
{{- $redis := dict -}}
{{- include "spillway.passed" (dict "section" (omit $tier.redis "existingSecret" "tls") "out" $redis) -}}
{{- $_ = set $redis "url" $url -}}
{{- $secret := dict -}}
{{- include "spillway.redisSecret" (dict "root" .root "tier" $tier "out" $secret) -}}
{{- if $secret.name -}}
{{- if $secret.usernameKey -}}{{- $_ = set $redis "usernameEnv" $names.variables.redisUsername -}}{{- end -}}
{{- if eq $secret.passwordAs "env" -}}{{- $_ = set $redis "passwordEnv" $names.variables.redisPassword -}}
{{- else -}}
{{- $_ = set $redis "passwordFile" (printf "%s/redis-password" $folder) -}}
{{- $entry := dict "key" $secret.passwordKey "path" "redis-password" -}}
{{- $files = append $files (dict "name" $secret.name "items" (list $entry)) -}}
{{- end -}}{{- end -}}
{{- $_ = set $item "redisSecret" $secret -}}{{- $tls := dict -}}
{{- with $tier.redis.tls.caSecret -}}{{- if .name -}}
{{- $_ := set $tls "caFile" (printf "%s/redis-ca.crt" $folder) -}}
{{- $files = append $files (dict "name" .name "items" (list (dict "key" .key "path" "redis-ca.crt"))) -}}
{{- end -}}{{- end -}}
{{- with $tier.redis.tls.clientSecret -}}{{- if .name -}}
{{- $_ := set $tls "certificateFile" (printf "%s/redis-client.crt" $folder) -}}
{{- $_ = set $tls "keyFile" (printf "%s/redis-client.key" $folder) -}}
{{- $files = append $files (dict "name" .name "items" (list (dict "key" .certificateKey "path" "redis-client.crt")
  (dict "key" .privateKeyKey "path" "redis-client.key"))) -}}
{{- end -}}{{- end -}}{{- with $tls -}}{{- $_ := set $redis "tls" . -}}{{- end -}}{{- $_ = set $out "redis" $redis -}}
{{- end -}}{{- if has "s3" $types -}}{{- $s3 := dict -}}
{{- include "spillway.passed" (dict "section" (omit $tier.s3 "existingSecret" "caSecret") "out" $s3) -}}
{{- if not $tier.s3.endpoint -}}{{- $_ := unset $s3 "endpoint" -}}{{- end -}}
{{- with $tier.s3.caSecret -}}{{- if .name -}}{{- $_ := set $s3 "caFile" (printf "%s/s3-ca.crt" $folder) -}}
{{- $files = append $files (dict "name" .name "items" (list (dict "key" .key "path" "s3-ca.crt"))) -}}
{{- end -}}{{- end -}}{{- $_ = set $out "s3" $s3 -}}
{{- end -}}
{{- if and (ne $tier.type "none") $tier.encryption.enabled -}}
{{- $_ = set $out "encryption" (dict "keyId" $tier.encryption.keyId "keyFile" (printf "%s/tier-key" $folder)) -}}
{{- $entry := dict "key" $tier.encryption.keySecretKey "path" "tier-key" -}}
{{- $files = append $files (dict "name" $tier.encryption.keySecretName "items" (list $entry)) -}}
{{- end -}}
{{- $_ = set $item "secretFiles" $files -}}
{{- end -}}

{{/* item -> one line for NOTES. */}}
{{- define "spillway.tierText" -}}
{{- $tier := .engine.offload.sharedTier -}}
{{- if eq $tier.type "none" -}}none
{{- else -}}{{- $settings := .settings.offload.sharedTier -}}
{{- if eq $tier.type "nvme" -}}
{{- $most := "4/5 of what the file system can give" -}}
{{- with $settings.nvme.maxBytes }}{{ $most = include "spillway.bytesText" . }}{{ end -}}
nvme, {{ $tier.nvme.mode }}, up to {{ $most }} on {{ $tier.nvme.volume.type }}
{{- if has $tier.nvme.volume.type (list "emptyDir" "perPodClaim") }} (one volume per pod, not shared){{ end }}
{{- else if eq $tier.type "s3" -}}
s3, {{ $tier.s3.bucket }}/{{ $tier.s3.prefix }} at {{ $tier.s3.endpoint | default "AWS" }}
{{- else -}}redis, {{ $settings.redis.url }}{{- end -}}
{{- if ne $tier.below.type "none" }}; below it {{ $tier.below.type }}{{ end }}
{{- if $tier.encryption.enabled }}, sealed with key {{ $tier.encryption.keyId }}{{ end }}
{{- end -}}{{- end -}}

{{/* item -> from which bandwidth on a load beats computing: prefill rate x bytes per token. */}}
{{- define "spillway.breakEvenText" -}}
{{- $rate := .engine.offload.prefillTokensPerSecond -}}
{{- $bandwidth := mulf (default 1000 $rate) .memory.bytesPerToken | int64 | include "spillway.bytesText" -}}
{{- if $rate -}}
above {{ $bandwidth }}/s per engine, at the given {{ $rate }} tokens/s of prefill
{{- else -}}
above {{ $bandwidth }}/s per engine for every 1000 tokens/s that it prefills
{{- end -}}{{- end -}}
