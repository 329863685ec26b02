{{/* Names and labels: the only place where either is made up. */}}

{{/* (text, max) -> text that fits; what is cut off is replaced by digits of its hash, so names stay distinct. */}}
{{- define "spillway.fit" -}}
{{- if le (len .text) .max -}}{{ .text }}
{{- else -}}{{ printf "%s-%s" (trunc (int (sub .max 9)) .text | trimSuffix "-") (sha256sum .text | trunc 8) }}
{{- end -}}{{- end -}}

{{- define "spillway.fullname" -}}
{{- $name := default .Chart.Name .Values.nameOverride -}}{{- $full := .Values.fullnameOverride -}}
{{- if not $full -}}
{{- $full = ternary .Release.Name (printf "%s-%s" .Release.Name $name) (contains $name .Release.Name) -}}
{{- end -}}
{{- include "spillway.fit" (dict "text" $full "max" 40) -}}
{{- end -}}

{{/* root -> where the objects go. */}}
{{- define "spillway.namespace" -}}
{{- default .Release.Namespace .Values.namespaceOverride -}}
{{- end -}}

{{/* (root, suffix) -> <fullname>-<suffix>. 52: Kubernetes appends 11 characters to a StatefulSet's name in labels. */}}
{{- define "spillway.name" -}}
{{- include "spillway.fit" (dict "text" (printf "%s-%s" (include "spillway.fullname" .root) .suffix) "max" 52) -}}
{{- end -}}

{{/* (root, component), or (root, item) of a group of engines -> the immutable labels that selectors use. */}}
{{- define "spillway.selectorLabels" -}}
{{- $name := default .root.Chart.Name .root.Values.nameOverride -}}
app.kubernetes.io/name: {{ include "spillway.fit" (dict "text" $name "max" 63) | quote }}
app.kubernetes.io/instance: {{ .root.Release.Name | quote }}
app.kubernetes.io/component: {{ default "engine" .component }}
{{- with .item }}
spillway/engine: {{ include "spillway.fit" (dict "text" .model "max" 63) | quote }}
{{- end }}{{- end -}}

{{/* (root, component or item) -> every label. */}}
{{- define "spillway.labels" -}}
{{ include "spillway.selectorLabels" . }}
app.kubernetes.io/part-of: spillway
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .root.Chart.Name .root.Chart.Version | replace "+" "_" | trunc 63 }}
{{- with .root.Values.commonLabels }}
{{ toYaml . }}
{{- end }}{{- end -}}

{{/* (root, component or item) -> labels of pods: nothing that a new chart version changes, so that an upgrade which
changes no setting restarts nothing. */}}
{{- define "spillway.podLabels" -}}
{{ include "spillway.selectorLabels" . }}
app.kubernetes.io/part-of: spillway
{{- with .root.Values.commonLabels }}
{{ toYaml . }}
{{- end }}{{- end -}}

{{/* (root, component or item[, suffix][, name][, annotations][, labels]) -> an object's metadata; its name is that
of the group of engines, or <fullname>-<suffix>, or what is given. */}}
{{- define "spillway.metadata" -}}
{{- $name := .name -}}
{{- if .suffix -}}{{- $name = include "spillway.name" . -}}{{- end -}}
name: {{ $name | default (default dict .item).name | quote }}
namespace: {{ include "spillway.namespace" .root | quote }}
labels:
  {{- include "spillway.labels" . | nindent 2 }}
  {{- with .labels }}{{- toYaml . | nindent 2 }}{{- end }}
{{- $annotations := dict }}
{{- $_ := include "spillway.overlay" (dict "base" $annotations "over" (default dict .root.Values.commonAnnotations)) }}
{{- $_ = include "spillway.overlay" (dict "base" $annotations "over" (default dict .annotations)) }}
{{- with $annotations }}
annotations:
  {{- toYaml . | nindent 2 }}
{{- end }}{{- end -}}

{{/* (root, item) -> labels of the pods that serve, as JSON: of a replica over several pods its leader alone. */}}
{{- define "spillway.servingLabels" -}}
{{- $leads := dict "leaderworkerset.sigs.k8s.io/worker-index" "0" -}}
{{- merge (include "spillway.selectorLabels" . | fromYaml) (eq .item.controller "LeaderWorkerSet" | ternary $leads dict)
  | toJson -}}
{{- end -}}

{{/* (of, and what spillway.metadata takes) -> the head of an object. of: API version and kind, apps/v1/Deployment. */}}
{{- define "spillway.object" -}}
apiVersion: {{ dir .of }}
kind: {{ base .of }}
metadata:
  {{- include "spillway.metadata" . | nindent 2 }}
{{- end -}}

{{/* (root, section, tag[, registry]) -> image, imagePullPolicy and envFrom of a container, by section.image and
section.envFrom. A digest wins over a tag. registry: the default if none is given. */}}
{{- define "spillway.image" -}}
{{- $image := .section.image -}}
{{- $registry := .root.Values.image.registry | default .registry | default "" -}}
{{- if not (kindIs "invalid" $image.registry) -}}{{- $registry = $image.registry -}}{{- end -}}
{{- $end := $image.digest | empty | ternary (printf ":%s" ($image.tag | default .tag)) (print "@" $image.digest) -}}
image: {{ printf "%s%s" (list $registry $image.repository | compact | join "/") $end | quote }}
imagePullPolicy: {{ default .root.Values.image.pullPolicy $image.pullPolicy }}
{{- with .section.envFrom }}
envFrom: {{- toYaml . | nindent 2 }}
{{- end }}{{- end -}}

{{/* (root, account, name) -> the ServiceAccount a pod runs as. */}}
{{- define "spillway.serviceAccount" -}}
{{- if .account.create -}}{{ default .name .account.name }}{{- else -}}{{ default "default" .account.name }}{{- end -}}
{{- end -}}
