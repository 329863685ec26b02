{{/* Names and labels: the only place where either is made up. */}}

{{/* (text, max) -> text that fits; what is cut off is replaced by eight digits of its hash, so names stay distinct. */}}
{{- define "spillway.fit" -}}
{{- if le (len .text) .max -}}{{ .text }}
{{- else -}}{{ printf "%s-%s" (trunc (int (sub .max 9)) .text | trimSuffix "-") (sha256sum .text | trunc 8) }}
{{- end -}}
{{- end -}}

{{- define "spillway.fullname" -}}
{{- $name := default .Chart.Name .Values.nameOverride -}}
{{- $full := .Values.fullnameOverride -}}
{{- if not $full -}}
{{- $full = ternary .Release.Name (printf "%s-%s" .Release.Name $name) (contains $name .Release.Name) -}}
{{- end -}}
{{- include "spillway.fit" (dict "text" $full "max" 40) -}}
{{- end -}}

{{/* root -> where the objects go. */}}
{{- define "spillway.namespace" -}}
{{- default .Release.Namespace .Values.namespaceOverride -}}
{{- end -}}

{{/* (root, suffix) -> <fullname>-<suffix>. 52 characters: Kubernetes appends 11 to a StatefulSet's name in a label. */}}
{{- define "spillway.name" -}}
{{- include "spillway.fit" (dict "text" (printf "%s-%s" (include "spillway.fullname" .root) .suffix) "max" 52) -}}
{{- end -}}

{{/* (root, component[, model]) -> the immutable labels that selectors use. */}}
{{- define "spillway.selectorLabels" -}}
app.kubernetes.io/name: {{ include "spillway.fit" (dict "text" (default .root.Chart.Name .root.Values.nameOverride) "max" 63) | quote }}
app.kubernetes.io/instance: {{ .root.Release.Name | quote }}
app.kubernetes.io/component: {{ .component }}
{{- with .model }}
spillway/engine: {{ include "spillway.fit" (dict "text" . "max" 63) | quote }}
{{- end }}
{{- end -}}

{{/* (root, component[, model]) -> every label. */}}
{{- define "spillway.labels" -}}
{{ include "spillway.selectorLabels" . }}
app.kubernetes.io/part-of: spillway
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .root.Chart.Name .root.Chart.Version | replace "+" "_" | trunc 63 }}
{{- with .root.Values.commonLabels }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{/* (root, component[, model]) -> labels of pods: nothing that a new chart version changes, so that an upgrade which
changes no setting restarts nothing. */}}
{{- define "spillway.podLabels" -}}
{{ include "spillway.selectorLabels" . }}
app.kubernetes.io/part-of: spillway
{{- with .root.Values.commonLabels }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{/* (root, component, name[, model][, annotations][, labels]) -> an object's metadata. */}}
{{- define "spillway.metadata" -}}
name: {{ .name | quote }}
namespace: {{ include "spillway.namespace" .root | quote }}
labels:
  {{- include "spillway.labels" . | nindent 2 }}
  {{- with .labels }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
{{- $annotations := dict }}
{{- $_ := include "spillway.overlay" (dict "base" $annotations "over" (default dict .root.Values.commonAnnotations)) }}
{{- $_ = include "spillway.overlay" (dict "base" $annotations "over" (default dict .annotations)) }}
{{- with $annotations }}
annotations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}

{{/* (root, image, tag[, registry]) -> reference. A digest wins over a tag. registry: where none is given at all. */}}
{{- define "spillway.image" -}}
{{- $registry := .root.Values.image.registry -}}
{{- if not $registry -}}{{- $registry = default "" .registry -}}{{- end -}}
{{- if not (kindIs "invalid" .image.registry) -}}{{- $registry = .image.registry -}}{{- end -}}
{{- $name := .image.repository -}}
{{- if $registry -}}{{- $name = printf "%s/%s" $registry $name -}}{{- end -}}
{{- if .image.digest -}}{{ $name }}@{{ .image.digest }}
{{- else -}}{{ $name }}:{{ default .tag .image.tag }}
{{- end -}}
{{- end -}}

{{/* (root, account, name) -> the ServiceAccount a pod runs as. */}}
{{- define "spillway.serviceAccount" -}}
{{- if .account.create -}}{{ default .name .account.name }}{{- else -}}{{ default "default" .account.name }}{{- end -}}
{{- end -}}
