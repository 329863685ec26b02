{{/* What the pod specs of several components share. */}}

{{/* (root, component or item, section, checksum[, container][, labels]) -> labels and annotations of a pod. checksum:
of what restarts it. */}}
{{- define "spillway.podMetadata" -}}
labels:
  {{- include "spillway.podLabels" . | nindent 2 }}
  {{- range list .labels .section.podLabels }}{{- with . }}{{- toYaml . | nindent 2 }}{{- end }}{{- end }}
annotations:
  checksum/config: {{ .checksum }}
  {{- with .section.secretsRevision }}
  spillway/secrets-revision: {{ . | quote }}{{ end }}
  {{- with .container }}
  kubectl.kubernetes.io/default-container: {{ . }}{{ end }}
  {{- with .section.podAnnotations }}{{- toYaml . | nindent 2 }}{{- end }}
{{- end -}}

{{/* (root, component or item, section, name, graceSeconds, context[, token] and what spillway.scheduling takes) -> a
pod's specification down to its containers. */}}
{{- define "spillway.podSpec" -}}
{{- $account := dict "account" .section.serviceAccount "name" .name }}
serviceAccountName: {{ include "spillway.serviceAccount" $account | quote }}
automountServiceAccountToken: {{ default false .token }}
enableServiceLinks: false
terminationGracePeriodSeconds: {{ .graceSeconds }}
{{- with include "spillway.scheduling" . }}{{- . | nindent 0 }}{{- end }}
securityContext: {{ toJson .context }}
{{- with .section.initContainers }}
initContainers:
  {{- toYaml . | nindent 2 }}
{{- end }}{{- end -}}

{{/* (root, component or item, section[, schedulerName][, nodeSelector][, tolerations]): where a pod may run, and who
pulls its images. */}}
{{- define "spillway.scheduling" -}}
{{- $section := .section -}}{{- $selector := dict -}}{{- $constraints := list -}}
{{- range list .nodeSelector $section.nodeSelector -}}
{{- include "spillway.overlay" (dict "base" $selector "over" (default dict .)) -}}
{{- end -}}
{{- with $section.topologySpread -}}
{{- $spread := merge (dict "maxSkew" (int64 .maxSkew)) (pick . "topologyKey" "whenUnsatisfiable") -}}
{{- if .enabled -}}{{- $constraints = append $constraints $spread -}}{{- end -}}
{{- end -}}
{{- $own := dict "labelSelector" (dict "matchLabels" (include "spillway.selectorLabels" . | fromYaml)) -}}
{{- $spec := pick $section "priorityClassName" "runtimeClassName" "affinity" "hostNetwork" "dnsPolicy" "dnsConfig"
  "hostAliases" "resourceClaims" -}}
{{- if and $section.hostNetwork (not $section.dnsPolicy) -}}
{{- $_ := set $spec "dnsPolicy" "ClusterFirstWithHostNet" -}}{{- end -}}
{{- $_ := set $spec "topologySpreadConstraints" list -}}
{{- range concat $constraints (default list $section.topologySpreadConstraints) -}}
{{- $constraint := merge (deepCopy .) (hasKey . "labelSelector" | ternary dict $own) -}}
{{- $_ := set $spec "topologySpreadConstraints" (append $spec.topologySpreadConstraints $constraint) -}}
{{- end -}}
{{- include "spillway.overlay" (dict "base" $spec "over" (dict "imagePullSecrets" .root.Values.image.pullSecrets
  "schedulerName" .schedulerName "nodeSelector" $selector
  "tolerations" (concat (default list .tolerations) (default list $section.tolerations)))) -}}
{{- range $key, $value := $spec -}}{{- if empty $value -}}{{- $_ := unset $spec $key -}}{{- end -}}{{- end -}}
{{- with $spec -}}{{- toYaml . -}}{{- end -}}
{{- end -}}

{{/* (root, component, container, command, volumes[, args][, env]) -> spec of a pod that runs the tools image once, on
nodes where gateways run. volumes: as Kubernetes has them, each with its mount path. */}}
{{- define "spillway.toolPod" -}}
{{- $gateway := .root.Values.gateway -}}
{{- $scheduling := pick $gateway "nodeSelector" "tolerations" "priorityClassName" "dnsConfig" "hostAliases" -}}
{{- $_ := set $scheduling "affinity" (pick $gateway.affinity "nodeAffinity") -}}
restartPolicy: Never
automountServiceAccountToken: false
enableServiceLinks: false
{{- with include "spillway.scheduling" (merge (dict "section" $scheduling) (pick . "root" "component")) | trim }}
{{ . }}{{ end }}
securityContext: {{ toJson $gateway.podSecurityContext }}
containers:
  - name: {{ .container }}
    {{- $image := dict "root" .root "section" .root.Values.checks "tag" .root.Chart.AppVersion }}
    {{- include "spillway.image" $image | nindent 4 }}
    {{- range $key, $value := pick . "command" "args" "env" }}
    {{- with $value }}{{- dict $key . | toYaml | nindent 4 }}{{- end }}
    {{- end }}
    # Where no log is read, kubectl describe shows its end.
    terminationMessagePolicy: FallbackToLogsOnError
    resources:
      requests: {cpu: 50m, memory: 96Mi}
      limits: {memory: 256Mi}
    securityContext: {{ toJson $gateway.securityContext }}
    volumeMounts:
      {{- range .volumes }}
      - {name: {{ .name }}, mountPath: {{ .folder }}, readOnly: true}{{ end }}
volumes:
  {{- range .volumes }}
  - {{ omit . "folder" | toYaml | indent 4 | trim }}{{ end }}
{{- end -}}

{{/* (root, section, of, name, component or item) -> spec.replicas: with autoscaling that of the live object, or of
the one that this replaces, as the API server sets 1 without the field; nothing without a cluster to ask. */}}
{{- define "spillway.replicas" -}}
{{- $own := omit (include "spillway.selectorLabels" . | fromYaml) "app.kubernetes.io/name" -}}{{- $found := dict -}}
{{- $kinds := list "apps/v1/StatefulSet" "apps/v1/Deployment" .of | uniq -}}
{{- range $kind := .section.autoscaling.enabled | ternary $kinds list -}}
{{- $live := lookup (dir $kind) (base $kind) (include "spillway.namespace" $.root) "" -}}
{{- if hasKey $live "items" }}{{ $_ := set $found "3" (max 1 $.section.autoscaling.minReplicas) }}{{ end -}}
{{- range $live.items -}}{{- $its := .metadata.labels | default dict -}}
{{- $rank := and (eq $kind $.of) (eq .metadata.name $.name) | ternary "1" "2" -}}
{{- if or (eq $rank "1") (eq (toJson $its) (merge (deepCopy $own) $its | toJson)) -}}
{{- $_ := set $found $rank (max .spec.replicas (get $found $rank | default 0)) -}}{{- end -}}{{- end -}}{{- end -}}
{{- if not .section.autoscaling.enabled }}{{ $_ := set $found "1" (int64 .section.replicas) }}{{ end -}}
{{- with keys $found | sortAlpha | first }}replicas: {{ get $found . }}{{ end -}}{{- end -}}

{{/* (root, seconds): a hook that waits. Kubernetes' own from 1.30 on, the image's sleep before. */}}
{{- define "spillway.preStop" -}}
{{- if gt (int64 .seconds) 0 }}
lifecycle:
  preStop:
    {{- if semverCompare ">=1.30-0" .root.Capabilities.KubeVersion.Version }}
    sleep: {seconds: {{ int64 .seconds }}}
    {{- else }}
    exec: {command: [sleep, "{{ int64 .seconds }}"]}
    {{- end }}{{- end }}{{- end -}}

{{/* (startupSeconds, probes[, startupPath][, port][, tls]): loading is the startup probe's; after it /ready decides on
traffic and /health on life. */}}
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
{{- end -}}{{- end -}}

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
      {{- end }}{{- end -}}

{{/* (intervalSeconds, relabelings, metricRelabelings): of a monitor's endpoint. */}}
{{- define "spillway.scrape" -}}
path: /metrics
interval: {{ int64 .intervalSeconds }}s
{{- range $key, $rules := pick . "relabelings" "metricRelabelings" }}
{{- with $rules }}{{- dict $key . | toYaml | nindent 0 }}{{- end }}
{{- end }}
{{- end -}}

{{/* (root, component or item) -> a selector of pods. */}}
{{- define "spillway.selector" -}}
{matchLabels: {{ include "spillway.selectorLabels" . | fromYaml | toJson }}}
{{- end -}}

{{/* (name, secret, key) -> a variable with an entry of a Secret; nothing without a Secret. */}}
{{- define "spillway.secretVariable" -}}
{{- if .secret -}}
- {name: {{ .name }}, valueFrom: {secretKeyRef: {name: {{ .secret | quote }}, key: {{ .key | quote }}}}}
{{- end -}}{{- end -}}

{{/* Egress rule of a NetworkPolicy: names. */}}
{{- define "spillway.dnsEgress" -}}
- to: [{namespaceSelector: {}}]
  ports: [{protocol: UDP, port: 53}, {protocol: TCP, port: 53}]
{{- end -}}
