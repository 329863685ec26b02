{{/* The parts of a gateway pod that have cases in them. */}}

{{/* (root, plan): the files of the gateway's ConfigMap. */}}
{{- define "spillway.gatewayFiles" -}}
{{- $settings := dict -}}
{{- include "spillway.gatewaySettings" (dict "root" .root "engines" .plan.engines "problems" dict "out" $settings) -}}
gateway.yaml: |
  # Written by the chart; read by spillway_gateway.
  {{- toYaml $settings | nindent 2 }}
{{- end -}}

{{/* gateway.auth -> the gateway's own `auth`: paths of files in place of Secrets. */}}
{{- define "spillway.gatewayAuth" -}}
reloadSeconds: {{ .reloadSeconds }}
unsaltedRoutes: {{ .unsaltedRoutes }}
{{- with .kvTransferTenants }}
kvTransferTenants: {{ toJson . }}
{{- end }}
{{- range include "spillway.authFiles" . | fromYamlArray }}
{{ .setting }}: {{ include "spillway.secretFolder" $ }}/{{ (first .items).path }}
{{- end }}
{{- with .sharedLimits }}
{{- if .url }}
sharedLimits:
  {{- toYaml (omit . "existingSecret" "caSecret") | nindent 2 }}
  {{- if .caSecret.name }}
  tlsCaFile: {{ include "spillway.secretFolder" $ }}/limits-ca.crt
  {{- end }}
  {{- if .existingSecret.name }}
  {{- if .existingSecret.usernameKey }}
  usernameEnv: SPILLWAY_LIMITS_USERNAME
  {{- end }}
  passwordEnv: SPILLWAY_LIMITS_PASSWORD
  {{- end }}
{{- end }}
{{- end }}
{{- end -}}

{{/* gateway.auth.sharedLimits -> list of EnvVars with its login. */}}
{{- define "spillway.limitsLogin" -}}
{{- $secret := .existingSecret -}}
{{- $variables := list -}}
{{- if and .url $secret.name -}}
{{- if $secret.usernameKey -}}
{{- $variables = append $variables (dict "name" "SPILLWAY_LIMITS_USERNAME" "valueFrom" (dict "secretKeyRef" (dict "name" $secret.name "key" $secret.usernameKey))) -}}
{{- end -}}
{{- $variables = append $variables (dict "name" "SPILLWAY_LIMITS_PASSWORD" "valueFrom" (dict "secretKeyRef" (dict "name" $secret.name "key" $secret.passwordKey))) -}}
{{- end -}}
{{- toYaml $variables -}}
{{- end -}}

{{/* gateway -> list of {name, items}: Secrets that become files in the gateway's pod. */}}
{{- define "spillway.gatewaySecretFiles" -}}
{{- $files := include "spillway.authFiles" .auth | fromYamlArray -}}
{{- with .tls.secret -}}
{{- if .name -}}
{{- $files = append $files (dict "name" .name "items" (list (dict "key" .certificateKey "path" "tls.crt") (dict "key" .privateKeyKey "path" "tls.key"))) -}}
{{- end -}}
{{- end -}}
{{- with .auth.sharedLimits -}}
{{- if and .url .caSecret.name -}}
{{- $files = append $files (dict "name" .caSecret.name "items" (list (dict "key" .caSecret.key "path" "limits-ca.crt"))) -}}
{{- end -}}
{{- end -}}
{{- toYaml $files -}}
{{- end -}}

{{/* gateway.auth -> list of {setting, name, items}: the Secret behind each of the gateway's own settings. */}}
{{- define "spillway.authFiles" -}}
{{- $files := list -}}
{{- $known := list (list "keysSecret" "keysFile" "gateway-keys.yaml") (list "saltSecret" "saltSecretFile" "gateway-salt") (list "engineKeySecret" "engineKeyFile" "engine-key") -}}
{{- range $entry := $known -}}
{{- $secret := get $ (index $entry 0) -}}
{{- if $secret.name -}}{{- $files = append $files (dict "setting" (index $entry 1) "name" $secret.name "items" (list (dict "key" $secret.key "path" (index $entry 2)))) -}}{{- end -}}
{{- end -}}
{{- toYaml $files -}}
{{- end -}}

{{/* seconds from the decision to end a pod to SIGKILL; 10: the last error events and the process's own end. */}}
{{- define "spillway.gatewayGraceSeconds" -}}
{{- with .Values.gateway.lifecycle -}}
{{ ceil (addf .preStopSeconds .drainDelaySeconds .drainTimeoutSeconds 10) | int64 }}
{{- end -}}
{{- end -}}

{{/* (root, plan) -> seconds after which a rollout counts as stuck. 300: pulling images and scheduling. */}}
{{- define "spillway.gatewayProgressSeconds" -}}
{{- $slowest := 0 -}}
{{- range .plan.engines -}}{{- $slowest = max $slowest (int64 .engine.lifecycle.startupTimeoutSeconds) -}}{{- end -}}
{{ add $slowest (int64 .root.Values.gateway.lifecycle.startupTimeoutSeconds) 300 }}
{{- end -}}

{{/* gateway.ingress -> list of {host, path}: `host` and `path`, unless only `hosts` are given, and these. */}}
{{- define "spillway.ingressRules" -}}
{{- $rules := list -}}
{{- if or .host (not .hosts) -}}{{- $rules = append $rules (dict "host" .host "path" .path) -}}{{- end -}}
{{- range .hosts -}}{{- $rules = append $rules (dict "host" .host "path" (default "/" .path)) -}}{{- end -}}
{{- toYaml $rules -}}
{{- end -}}

{{/* root -> seconds for which a request that the gateway still works on may send no byte, and ten to spare. */}}
{{- define "spillway.silentSeconds" -}}
{{- $plan := dict -}}
{{- include "spillway.plan" (dict "root" . "plan" $plan) -}}
{{- $times := .Values.gateway.timeouts -}}
{{- $most := max (int64 $times.plainSeconds) (int64 $times.firstByteSeconds) (int64 $times.idleSeconds) -}}
{{- range $plan.engines -}}
{{- if and .engine.autoscaling.enabled (eq (int64 .engine.autoscaling.minReplicas) 0) -}}
{{- $wake := default .engine.lifecycle.startupTimeoutSeconds .engine.autoscaling.wakeTimeoutSeconds -}}
{{- $most = max $most (int64 $wake) -}}
{{- end -}}
{{- end -}}
{{- add $most 10 -}}
{{- end -}}

{{/* root -> annotations that hold ingress-nginx to the gateway's own bounds, in place of its 60 seconds and 1 MiB. */}}
{{- define "spillway.ingressBounds" -}}
{{- $bytes := include "spillway.bytes" (dict "value" .Values.gateway.limits.bodyBytesMax
  "path" "gateway.limits.bodyBytesMax") -}}
{{- $seconds := include "spillway.silentSeconds" . -}}
nginx.ingress.kubernetes.io/proxy-body-size: {{ printf "%dm" (div (add (int64 $bytes) 1048575) 1048576) }}
nginx.ingress.kubernetes.io/proxy-read-timeout: {{ $seconds | quote }}
nginx.ingress.kubernetes.io/proxy-send-timeout: {{ $seconds | quote }}
{{- end -}}

{{/* item -> where a model's volume lies in the gateway: a folder of its own, as several models may share a mountPath. */}}
{{- define "spillway.tokenizerRoot" -}}
/var/lib/spillway/models/{{ .model }}
{{- end -}}

{{/* plan -> list of {name, mountPath, volume}: models whose tokenizer the gateway reads from the model's own volume. */}}
{{- define "spillway.tokenizerVolumes" -}}
{{- $found := list -}}
{{- range $item := .engines -}}
{{- if eq $item.engine.model.tokenizer "volume" -}}
{{- $found = append $found (dict "name" (include "spillway.fit" (dict "text" (printf "model-%s" $item.model) "max" 63)) "mountPath" (include "spillway.tokenizerRoot" $item) "volume" (merge (dict "readOnly" true) $item.engine.model.volume)) -}}
{{- end -}}
{{- end -}}
{{- toYaml $found -}}
{{- end -}}
