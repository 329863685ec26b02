{{/* What the pod specs of several components share. */}}

{{/* (root, component, model, section): where a pod may run, and who pulls its images. */}}
{{- define "spillway.scheduling" -}}
{{- with .root.Values.image.pullSecrets }}
imagePullSecrets:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .section.priorityClassName }}
priorityClassName: {{ . | quote }}
{{- end }}
{{- with .schedulerName }}
schedulerName: {{ . | quote }}
{{- end }}
{{- with .section.runtimeClassName }}
runtimeClassName: {{ . | quote }}
{{- end }}
{{- $selector := dict }}
{{- $_ := include "spillway.overlay" (dict "base" $selector "over" (default dict .nodeSelector)) }}
{{- $_ = include "spillway.overlay" (dict "base" $selector "over" (default dict .section.nodeSelector)) }}
{{- with $selector }}
nodeSelector:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with concat (default list .tolerations) (default list .section.tolerations) }}
tolerations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .section.affinity }}
affinity:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- $spread := list }}
{{- with .section.topologySpread }}
{{- if .enabled }}{{ $spread = append $spread (dict "topologyKey" .topologyKey "maxSkew" (int64 .maxSkew) "whenUnsatisfiable" .whenUnsatisfiable) }}{{ end }}
{{- end }}
{{- $own := dict "matchLabels" (include "spillway.selectorLabels" $ | fromYaml) }}
{{- $constraints := list }}
{{- range concat $spread (default list .section.topologySpreadConstraints) }}{{ $constraints = append $constraints (hasKey . "labelSelector" | ternary . (set (deepCopy .) "labelSelector" $own)) }}{{ end }}
{{- with $constraints }}
topologySpreadConstraints:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- if .section.hostNetwork }}
hostNetwork: true
{{- end }}
{{- with default (ternary "ClusterFirstWithHostNet" "" (default false .section.hostNetwork)) .section.dnsPolicy }}
dnsPolicy: {{ . }}
{{- end }}
{{- end -}}

{{/* (root, section, kind, name) -> spec.replicas, and nothing where an autoscaler decides and no object runs yet.
What an autoscaler decides is repeated from the live object: an upgrade that left `replicas` out would take it away from
an object that has it, and the API server's default is 1. Without a cluster to ask (helm template, Argo CD) there is no
live object: docs/operations.md, "Turning autoscaling on". */}}
{{- define "spillway.replicas" -}}
{{- if not .section.autoscaling.enabled -}}
replicas: {{ int64 .section.replicas }}
{{- else -}}
{{- with lookup "apps/v1" .kind (include "spillway.namespace" .root) .name -}}
replicas: {{ int64 .spec.replicas }}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* (root, seconds): a hook that waits. Kubernetes' own from 1.30 on, the image's sleep before. */}}
{{- define "spillway.preStop" -}}
{{- if gt (int64 .seconds) 0 }}
lifecycle:
  preStop:
    {{- if semverCompare ">=1.30-0" .root.Capabilities.KubeVersion.Version }}
    sleep: {seconds: {{ int64 .seconds }}}
    {{- else }}
    exec: {command: [sleep, "{{ int64 .seconds }}"]}
    {{- end }}
{{- end }}
{{- end -}}

{{/* (startupSeconds, probes[, startupPath][, port][, tls]): loading is the startup probe's; after it /ready decides on traffic and /health on life. */}}
{{- define "spillway.probes" -}}
{{- $port := printf "port: %s%s" (default "http" .port) (ternary ", scheme: HTTPS" "" (default false .tls)) -}}
{{- $startup := int64 .probes.startup.periodSeconds -}}
startupProbe:
  httpGet: {path: {{ default "/ready" .startupPath }}, {{ $port }}}
  periodSeconds: {{ $startup }}
  timeoutSeconds: {{ int64 .probes.startup.timeoutSeconds }}
  failureThreshold: {{ div (add (int64 .startupSeconds) (sub $startup 1)) $startup }}
readinessProbe:
  httpGet: {path: /ready, {{ $port }}}
  {{- include "spillway.probeTimes" .probes.readiness | nindent 2 }}
livenessProbe:
  httpGet: {path: /health, {{ $port }}}
  {{- include "spillway.probeTimes" .probes.liveness | nindent 2 }}
{{- end -}}

{{/* (periodSeconds, timeoutSeconds, failureThreshold) */}}
{{- define "spillway.probeTimes" -}}
periodSeconds: {{ int64 .periodSeconds }}
timeoutSeconds: {{ int64 .timeoutSeconds }}
failureThreshold: {{ int64 .failureThreshold }}
{{- end -}}

{{/* (type, claimName, hostPath, nfs, sizeLimit, readOnly) -> the source of a volume. */}}
{{- define "spillway.volumeSource" -}}
{{- if eq .type "existingClaim" -}}
persistentVolumeClaim: {claimName: {{ .claimName | quote }}{{ if .readOnly }}, readOnly: true{{ end }}}
{{- else if eq .type "hostPath" -}}
hostPath: {path: {{ .hostPath | quote }}, type: {{ ternary "Directory" "DirectoryOrCreate" (default false .readOnly) }}}
{{- else if eq .type "nfs" -}}
nfs: {server: {{ .nfs.server | quote }}, path: {{ .nfs.path | quote }}, readOnly: true}
{{- else if eq .type "emptyDir" -}}
emptyDir: {{ if .sizeLimit }}{sizeLimit: {{ .sizeLimit }}}{{ else }}{}{{ end }}
{{- end -}}
{{- end -}}

{{/* list of {name, items} -> the volume of a pod's Secrets. Kubernetes renews the files when a Secret changes. */}}
{{- define "spillway.secretsVolume" -}}
- name: secrets
  projected:
    # For root alone, and for fsGroup where the pod has one.
    defaultMode: 0400
    sources:
      {{- range . }}
      - secret:
          name: {{ .name | quote }}
          items:
            {{- toYaml .items | nindent 12 }}
      {{- end }}
{{- end -}}

{{/* (intervalSeconds, relabelings, metricRelabelings): of a monitor's endpoint. */}}
{{- define "spillway.scrape" -}}
path: /metrics
interval: {{ int64 .intervalSeconds }}s
{{- with .relabelings }}
relabelings:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .metricRelabelings }}
metricRelabelings:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}

{{/* Egress rule of a NetworkPolicy: names. */}}
{{- define "spillway.dnsEgress" -}}
- to: [{namespaceSelector: {}}]
  ports:
    - {protocol: UDP, port: 53}
    - {protocol: TCP, port: 53}
{{- end -}}
