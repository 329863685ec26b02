{{/*
The rules that hold without `spillway check`: those without which `helm template | kubectl apply` would render
nothing that can run, would open a release to others, or would break one that runs before anything says so. There are at
most fifteen. Every other rule is in services/ctl/src/spillway_ctl/check/, which the chart's hook runs before a pod
changes, and a new rule goes there. Above each is why it is here; tests/chart/mistakes.yaml has values that it refuses.
*/}}

{{/* (root, rules): fails with everything that these rules say of the values; one sentence a line. */}}
{{- define "spillway.requireRules" -}}
{{- $root := .root -}}{{- $said := list -}}
{{- range .rules -}}
{{- $said = concat $said (include (printf "spillway.rule.%s" .) $root | splitList "\n" | compact) -}}
{{- end -}}
{{- with $said -}}{{- fail (printf "\n\nThese values cannot work:\n- %s\n" (join "\n- " .)) -}}{{- end -}}
{{- end -}}

{{/* 1. Null takes a default away that nothing replaces: pods without ports, probes without paths. */}}
{{- define "spillway.rule.removed" -}}
{{- range $path, $keys := .Files.Get "files/needed-settings.json" | fromJson -}}
{{- $section := $.Values -}}
{{- range compact (splitList "." $path) -}}{{- $section = get (default dict $section) . -}}{{- end -}}
{{- range $keys -}}
{{- if and (kindIs "map" $section) (not (hasKey (default dict $section) .)) -}}
{{- printf "%s: null given, but nothing stands in for its default; remove the line\n"
  (list $path . | compact | join ".") -}}
{{- end -}}{{- end -}}{{- end -}}{{- end -}}

{{/* 2. The API server takes no Service of such a name, but the other objects, so that a release is half there. */}}
{{- define "spillway.rule.name" -}}
{{- $name := include "spillway.fullname" . -}}
{{- if not (regexMatch "^[a-z]([-a-z0-9]*[a-z0-9])?$" $name) -}}
{{- printf "the release: %q begins the names of its objects, which are %s; set fullnameOverride, e.g. %s\n" $name
  "small letters, digits and dashes alone, no dot" (regexReplaceAll "[^-a-z0-9]" $name "-") -}}
{{- end -}}{{- end -}}

{{/* 3. (value, path) A pod cannot be sized by what is no size. */}}
{{- define "spillway.rule.size" -}}
{{- fail (printf "%s: %q is no size up to 8PiB; write for example 512MiB, 64Gi, 1TB or a number of bytes" .path
  (toString .value)) -}}
{{- end -}}

{{/* 4. (path, engine, shape) Nor by a model whose KV cache is unknown. */}}
{{- define "spillway.rule.shape" -}}
{{- if not (and .shape.layers (or .shape.latentDim (and .shape.kvHeads .shape.headDim))) -}}
{{- $preset := .engine.model.shape.preset -}}
{{- fail (printf "%s.model.%s: %q is no known model; set %s.model.shape.%s" .path (ternary "shape.preset" "path"
  (not (empty $preset))) (default .engine.model.path $preset) .path
  "preset to the one it is made from, or layers, kvHeads and headDim (or latentDim)") -}}
{{- end -}}{{- end -}}

{{/* 5. All engines start, and the kernel kills one after the other once their CPU tier fills. */}}
{{- define "spillway.rule.memory" -}}
{{- range .spillwayPlan -}}
{{- $memory := .memory -}}{{- $at := printf "%s.memory" .path -}}
{{- if gt (mulf $memory.cpuChunks $memory.cpuRowBytes) 9007199254740992.0 -}}
{{- printf "%s.offload.numCpuBlocks: %d chunks given, at most 8PiB needed; lower it\n" .path $memory.cpuChunks -}}
{{- else if .engine.memory.force -}}
{{- else if lt $memory.memoryLimitBytes $memory.podNeedsBytes -}}
{{- printf "%s.limit: %s given, but %s; set it to %s or more, or to null\n" $at (toString .engine.memory.limit)
  $memory.arithmetic (include "spillway.quantity" $memory.podNeedsBytes) -}}
{{- else if lt $memory.sharedMemoryBytes $memory.sharedMemoryNeededBytes -}}
{{- printf "%s.sharedMemory: %s given, %s needed; set it to that or more, or to null\n" $at
  (toString .engine.memory.sharedMemory) (include "spillway.quantity" $memory.sharedMemoryNeededBytes) -}}
{{- end -}}{{- end -}}{{- end -}}

{{/* 6. A running gateway goes on with its old models, and no new one starts. */}}
{{- define "spillway.rule.served" -}}
{{- $served := dict -}}{{- $owners := dict -}}{{- $withRoles := dict -}}
{{- range .spillwayPlan -}}
{{- if ne .engine.role "both" -}}{{- $_ := set $withRoles .servedName true -}}{{- end -}}{{- end -}}
{{- range $item := .spillwayPlan -}}
{{- $names := concat (list .servedName) (default list .engine.model.aliases) -}}
{{- range concat (default list .engine.lora.adapters) (default list .engine.lora.aliases) -}}
{{- $names = append $names .name -}}
{{- end -}}
{{- range $names -}}
{{- $isOneModel := and (hasKey $withRoles $item.servedName) (eq (get $owners .) $item.servedName) -}}
{{- if and (hasKey $served .) (not (and $isOneModel (ne (get $served .) $item.path))) -}}
{{- printf "%s: the name %q is already served by %s; set another model.servedName, alias or name of an adapter\n"
  $item.path . (get $served .) -}}
{{- end -}}
{{- $_ := set $served . $item.path -}}{{- $_ = set $owners . $item.servedName -}}{{- end -}}{{- end -}}{{- end -}}

{{/* 7. An index of slabs that several kernels map is overwritten: the tier that running engines share is lost. */}}
{{- define "spillway.rule.slab" -}}
{{- range .spillwayPlan -}}
{{- $nvme := .engine.offload.sharedTier.nvme -}}
{{- $isShared := or (eq $nvme.volume.type "sharedClaim") (and (eq $nvme.volume.type "existingClaim") (gt .pods 1)) -}}
{{- if and (include "spillway.usesNvme" .) (eq $nvme.mode "slab") $isShared -}}
{{- printf "%s.offload.sharedTier.nvme.mode: slab needs a disk of one node, but several mount a %s; set mode: files\n"
  .path $nvme.volume.type -}}
{{- end -}}{{- end -}}{{- end -}}

{{/* 8. The gateway would require no key, or salt no cache, although a part of auth says that it should; with an
engine key alone it would add that key to the requests of clients that have none. */}}
{{- define "spillway.rule.auth" -}}
{{- with .Values.gateway.auth -}}
{{- if not (eq (empty .keysSecret.name) (empty .saltSecret.name)) -}}
{{- printf "gateway.auth: one of keysSecret.name and saltSecret.name is empty; name both Secrets, or neither\n" -}}
{{- else if and .engineKeySecret.name (not .keysSecret.name) -}}
{{- print "gateway.auth.engineKeySecret.name: given, but clients need no key; set keysSecret and saltSecret too\n" -}}
{{- end -}}{{- end -}}{{- end -}}

{{/* 9. Engines would answer every request of a release with 401, as the gateway has no key for them. */}}
{{- define "spillway.rule.engineKey" -}}
{{- $auth := .Values.gateway.auth -}}
{{- range .spillwayPlan -}}
{{- if and .engine.apiKeySecret.name $auth.keysSecret.name (not $auth.engineKeySecret.name) -}}
{{- printf "gateway.auth.engineKeySecret.name: is empty, but %s.apiKeySecret is set; name that Secret here\n" .path -}}
{{- end -}}{{- end -}}{{- end -}}

{{/* 10. A credential would lie in a ConfigMap or a pod's specification, for all to read who may list these. */}}
{{- define "spillway.rule.credential" -}}
{{- include "spillway.openText" (dict "value" (omit .Values "extraObjects") "path" ""
  "looks" .spillwayNames.credentials) -}}
{{- end -}}

{{/* (value, path, looks): a line for each text below a value that looks like a credential, where texts lie open. */}}
{{- define "spillway.openText" -}}
{{- range $key, $entry := .value -}}
{{- $at := printf (kindIs "map" $.value | ternary "%s.%v" "%s[%v]") $.path $key | trimPrefix "." -}}
{{- if or (kindIs "map" $entry) (kindIs "slice" $entry) -}}
{{- include "spillway.openText" (dict "value" $entry "path" $at "looks" $.looks) -}}
{{- else if kindIs "string" $entry -}}
{{- $isVariable := regexMatch "[.](extraEnvVars|env)[[][0-9]+[]][.]value$" $at -}}
{{- $isNamed := or $isVariable (regexMatch "[.](extraEnv|extraConfig|extraTiers[[][0-9]+[]])[.]" $at) -}}
{{- $isFlag := regexMatch "[.]extraArgs[[][0-9]+[]]$" $at -}}
{{- $name := $isVariable | ternary (get (kindIs "map" $.value | ternary $.value dict) "name") $key | toString -}}
{{- $isHarmless := or (regexMatch $.looks.harmless $entry) (regexMatch "[$][(][A-Za-z_]" $entry) -}}
{{- $opens := and $isNamed (not $isHarmless) (regexMatch $.looks.name $name) -}}
{{- if and $isFlag (regexMatch "^--?(api[-_]key|hf[-_]token|[a-z_-]*(password|secret))(=|$)" $entry) -}}
{{- $opens = true -}}
{{- else if or $isNamed $isFlag (regexMatch "([uU]rl|Endpoint|Address)$" $at) -}}
{{- $opens = or $opens (regexMatch $.looks.value (regexReplaceAll "^-[^=]*=" $entry "")) -}}
{{- end -}}
{{- if regexMatch "[sS]ecret([.]name|Name)?$|pullSecrets[[][0-9]+[]][.]name$|secretKeyRef[.]name$" $at -}}
{{- if regexMatch "[^-a-z0-9.]|[0-9a-f]{32}|^(sk|pk|rk)-[a-z0-9]{16}" $entry -}}
{{- printf "%s: no name of a Secret, or a credential, which would lie open; name the Secret that holds it\n" $at -}}
{{- end -}}
{{- else if $opens -}}
{{- printf "%s: what looks like a credential would lie open; put it into a Secret, and name that by %s\n" $at
  "existingSecret, or by valueFrom.secretKeyRef in extraEnvVars" -}}
{{- end -}}{{- end -}}{{- end -}}{{- end -}}

{{/* 11. The key of a sealed tier itself in a ConfigMap, where its public name belongs. */}}
{{- define "spillway.rule.key" -}}
{{- range .spillwayPlan -}}
{{- $id := .engine.offload.sharedTier.encryption.keyId -}}
{{- if regexMatch "^([0-9a-fA-F]{32}|[0-9a-fA-F]{48}|[0-9a-fA-F]{64})$" $id -}}
{{- printf "%s.offload.sharedTier.encryption.keyId: what is given looks like the key itself; make another, and %s\n"
  .path "keep it in the Secret alone" -}}
{{- end -}}{{- end -}}{{- end -}}

{{/* 12. Blocks would be stored in the clear where they are expected to be sealed. */}}
{{- define "spillway.rule.sealed" -}}
{{- range .spillwayPlan -}}
{{- $path := .path -}}
{{- with .engine.offload.sharedTier.encryption -}}
{{- if and (not .enabled) (or .keyId .keySecretName) -}}
{{- printf "%s.offload.sharedTier.encryption.enabled: false given beside a key; set it to true, or remove the key\n"
  $path -}}
{{- end -}}{{- end -}}{{- end -}}{{- end -}}

{{/* 13. bytes: no Secret holds such values, and the hook that reads them there would end without a sentence. */}}
{{- define "spillway.rule.hook" -}}
{{- if gt . 1048576 -}}
{{- fail (printf "checks.hook: true, but the values take %d bytes and a Secret holds 1048576; set checks.hook: %s" .
  "false and run spillway check before an upgrade") -}}
{{- end -}}{{- end -}}
