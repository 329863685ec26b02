{{/* What the settings of an engine are called in values.yaml, for the messages of the engine service. */}}

{{/* (root, item, out): fills out with `door:` of the engine's configuration: names of settings whose value is called
otherwise, and the form of all other names. */}}
{{- define "spillway.settingNames" -}}
{{- $path := .item.path -}}{{- $tier := printf "%s.offload.sharedTier" $path -}}
{{- $redis := .item.engine.offload.sharedTier.redis -}}
{{- $credentials := printf "%s.redis.existingSecret" $tier -}}
{{- if and (not $redis.existingSecret.name) (not $redis.url) .root.Values.redis.enabled -}}
{{- $credentials = "redis.existingSecret" -}}
{{- end -}}
{{- $names := dict
  "host" "listenAddress" "platform" (printf "%s.accelerator.preset" $path)
  "versionCheck" (printf "%s.accelerator.versionCheck" $path)
  "cpuBinding" (printf "%s.accelerator.cpuBinding" $path)
  "offload.sharedTier.redis.usernameEnv" $credentials "offload.sharedTier.redis.passwordEnv" $credentials
  "offload.sharedTier.redis.passwordFile" $credentials
  "offload.sharedTier.redis.tls.caFile" (printf "%s.redis.tls.caSecret" $tier)
  "offload.sharedTier.redis.tls.certificateFile" (printf "%s.redis.tls.clientSecret" $tier)
  "offload.sharedTier.redis.tls.keyFile" (printf "%s.redis.tls.clientSecret" $tier)
  "offload.sharedTier.s3.caFile" (printf "%s.s3.caSecret" $tier)
  "offload.sharedTier.encryption.keyFile" (printf "%s.encryption.keySecretName" $tier)
  "offload.sharedTier.encryption.keyEnv" (printf "%s.encryption.keySecretName" $tier)
-}}
{{- include "spillway.overlay" (dict "base" .out "over" (dict "names" $names "others" (printf "%s.{path}" $path))) -}}
{{- end -}}
