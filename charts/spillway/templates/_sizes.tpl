{{/*
Sizes: every one among the values is read by spillway.readSize, the function that Python has as
spillway_settings.byte_sizes. tests/size_cases.yaml is the table of both.
*/}}

{{/* value -> its bytes as decimal text, or the reason why it is no size. A Kubernetes quantity of bytes (64G, 16Gi, 12e9),
a size with the unit spelt out (512MiB, 1TB) or a number; a fraction of a byte is rounded up. Integers alone: templates
have no exact fractions. */}}
{{- define "spillway.readSize" -}}
{{- $largest := 9223372036854775807 -}}
{{- if or (kindIs "int64" .) (kindIs "int" .) -}}
{{- if lt (int64 .) 0 -}}is negative{{- else -}}{{ int64 . }}{{- end -}}
{{- else if kindIs "float64" . -}}
{{- if lt . 0.0 -}}is negative
{{- else if and (gt . 0.0) (lt . 1.0) -}}is less than one byte
{{- else if ge . 9223372036854775808.0 -}}is 8 EiB or more
{{- else -}}{{ int64 (ceil .) }}
{{- end -}}
{{- else if regexMatch "^[1-9][0-9]{0,5}[MGT]iB?$" . -}}
{{- /* What most sizes are, as each of the steps below costs time in every render. */ -}}
{{- $unit := regexFind "[MGT]" . -}}
{{- mul (int64 (regexFind "^[0-9]+" .)) (get (dict "M" 1048576 "G" 1073741824 "T" 1099511627776) $unit) -}}
{{- else -}}
{{- $text := toString . -}}
{{- $form := "^ *([+-]?)([0-9]*)(\\.([0-9]*))?(([eE])([+-]?)([0-9]{1,2}))? *([A-Za-z]*) *$" -}}
{{- $part := dict -}}
{{- if and (le (len $text) 64) (regexMatch $form $text) -}}
{{- range $name, $group := dict "sign" "${1}" "whole" "${2}" "parts" "${4}" "exponent" "${6}" "shiftSign" "${7}" "shift" "${8}" "unit" "${9}" -}}
{{- $_ := set $part $name (regexReplaceAll $form $text $group) -}}
{{- end -}}
{{- end -}}
{{- /* One letter is Kubernetes' own and in its case; more mean one thing in any case. */ -}}
{{- $factors := dict "" 1 "B" 1 "k" 1000 "M" 1000000 "G" 1000000000 "T" 1000000000000 "P" 1000000000000000 "E" 1000000000000000000 "KB" 1000 "MB" 1000000 "GB" 1000000000 "TB" 1000000000000 "PB" 1000000000000000 "EB" 1000000000000000000 "KI" 1024 "MI" 1048576 "GI" 1073741824 "TI" 1099511627776 "PI" 1125899906842624 "EI" 1152921504606846976 "KIB" 1024 "MIB" 1048576 "GIB" 1073741824 "TIB" 1099511627776 "PIB" 1125899906842624 "EIB" 1152921504606846976 -}}
{{- $unit := default "" $part.unit -}}
{{- if ne (len $unit) 1 -}}{{- $unit = upper $unit -}}{{- end -}}
{{- if or (not $part) (not (or $part.whole $part.parts)) (and $part.exponent $part.unit) -}}is no size
{{- else if has $unit (list "n" "u" "m") -}}has a suffix for fractions of a byte
{{- else if not (hasKey $factors $unit) -}}is no size
{{- else if eq $part.sign "-" -}}is negative
{{- else -}}
{{- $factor := int64 (get $factors $unit) -}}
{{- /* The point moved by the exponent, in digits with room on both sides. */ -}}
{{- $room := repeat 99 "0" -}}
{{- $digits := printf "%s%s%s%s" $room $part.whole $part.parts $room -}}
{{- $shift := int (default "0" (regexReplaceAll "^0+" $part.shift "")) -}}
{{- $point := int (add 99 (len $part.whole) (ternary (sub 0 $shift) $shift (eq $part.shiftSign "-"))) -}}
{{- $whole := regexReplaceAll "^0+" (substr 0 $point $digits) "" -}}
{{- $parts := regexReplaceAll "0+$" (substr $point (len $digits) $digits) "" -}}
{{- if or (gt (len $whole) 19) (and (eq (len $whole) 19) (gt $whole (toString $largest))) -}}is 8 EiB or more
{{- else if gt (int64 (default "0" $whole)) (div $largest $factor) -}}is 8 EiB or more
{{- else -}}
{{- $bytes := mul (int64 (default "0" $whole)) $factor -}}
{{- /* 0.parts x factor by long division from the last digit: (digit x factor + what came before) / 10. Halved, as nine
exabytes and a carry would not fit into 64 bits; every factor but 1 is even. */ -}}
{{- $below := 0 -}}{{- $isFraction := and (eq $factor 1) (ne $parts "") -}}
{{- if gt $factor 1 -}}
{{- range $digit := splitList "" $parts | reverse -}}
{{- $low := add (mul (int64 $digit) (div $factor 2)) (div $below 2) -}}
{{- $isFraction = or $isFraction (ne (mod $below 2) 0) (ne (mod $low 5) 0) -}}
{{- $below = div $low 5 -}}
{{- end -}}
{{- end -}}
{{- if and $isFraction (eq (add $bytes $below) 0) -}}is less than one byte
{{- else -}}
{{- $below = add $below (ternary 1 0 $isFraction) -}}
{{- if gt $below (sub $largest $bytes) -}}is 8 EiB or more{{- else -}}{{ add $bytes $below }}{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* (value, path) -> bytes as decimal text. What is no size fails the render by name, wherever it is read. */}}
{{- define "spillway.bytes" -}}
{{- with include "spillway.sizeProblem" . -}}{{- fail . -}}{{- end -}}
{{- include "spillway.readSize" .value -}}
{{- end -}}

{{/* (value, path, least) -> what is wrong with a size; nothing where it is one. least: a size; without it 0.
Beyond 8 PiB the chart's own sums would not fit into 64 bits. */}}
{{- define "spillway.sizeProblem" -}}
{{- $read := include "spillway.readSize" .value -}}
{{- $given := ternary (printf "%q" .value) (toString .value) (kindIs "string" .value) -}}
{{- $example := "write for example 512MiB, 64Gi, 1TB or a number of bytes" -}}
{{- if not (regexMatch "^[0-9]+$" $read) -}}
{{- printf "%s: %s %s; %s" .path $given $read $example -}}
{{- else if lt (int64 $read) (int64 (include "spillway.readSize" (default 0 .least))) -}}
{{- printf "%s: %s given, at least %v needed; %s" .path $given (ternary "1 byte" .least (eq (toString .least) "1")) $example -}}
{{- else if gt (int64 $read) 9007199254740992 -}}
{{- printf "%s: %s given, at most 8PiB needed; %s" .path $given $example -}}
{{- end -}}
{{- end -}}

{{/* (root, groups, problems): every size among the values. Read before anything is computed from them, so that one that
cannot be read is reported alone, not with the contradictions that 0 bytes would make. */}}
{{- define "spillway.sizeChecks" -}}
{{- $sizes := dict -}}{{- $least := dict -}}
{{- range $key, $engine := .groups -}}
{{- $path := ternary (printf "engines.%s" $key) "engine" (ne $key "") -}}
{{- $tier := $engine.offload.sharedTier -}}
{{- $own := dict
  "model.shape.weightBytes" $engine.model.shape.weightBytes
  "model.cache.sizeLimit" $engine.model.cache.sizeLimit
  "ephemeralStorage.limit" $engine.ephemeralStorage.limit
  "ephemeralStorage.request" $engine.ephemeralStorage.request
  "hugePages.amount" $engine.hugePages.amount
  "memory.limit" $engine.memory.limit
  "memory.sharedMemory" $engine.memory.sharedMemory
  "memory.processPerRank" $engine.memory.processPerRank
  "memory.pageCache" $engine.memory.pageCache
  "offload.cpuBytes" $engine.offload.cpuBytes
  "offload.sharedTier.loadQueueBytesMax" $tier.loadQueueBytesMax
  "offload.sharedTier.storeQueueBytesMax" $tier.storeQueueBytesMax
  "offload.sharedTier.nvme.maxBytes" $tier.nvme.maxBytes
  "offload.sharedTier.nvme.tenantMaxBytes" $tier.nvme.tenantMaxBytes
  "offload.sharedTier.nvme.volume.size" $tier.nvme.volume.size
  "offload.sharedTier.redis.tenantMaxBytes" $tier.redis.tenantMaxBytes
-}}
{{- range $name, $value := $own -}}{{- $_ := set $sizes (printf "%s.%s" $path $name) $value -}}{{- end -}}
{{- $_ := set $least (printf "%s.memory.pageCache" $path) 0 -}}
{{- /* Less holds no Python with torch; a bare 8 is eight bytes. */ -}}
{{- $_ = set $least (printf "%s.memory.processPerRank" $path) "512MiB" -}}
{{- end -}}
{{- $gateway := .root.Values.gateway -}}
{{- $_ := set $sizes "redis.memory" .root.Values.redis.memory -}}
{{- /* Of 0 bytes Valkey would make no bound at all; and the server itself has to fit into the quarter that is not for blocks. */ -}}
{{- $_ = set $least "redis.memory" "64MiB" -}}
{{- range $kind := list "requests" "limits" -}}
{{- range $what := list "memory" "ephemeralStorage" -}}{{- $_ := set $sizes (printf "gateway.resources.%s.%s" $kind $what) (index (default dict (get $gateway.resources $kind)) $what) -}}{{- end -}}
{{- end -}}
{{- range $setting := include "spillway.gatewaySizes" . | fromYamlArray -}}
{{- $_ := set $sizes (printf "gateway.%s" $setting) (index (get $gateway (splitList "." $setting | first)) (splitList "." $setting | last)) -}}
{{- end -}}
{{- $problems := .problems -}}
{{- range $path, $value := $sizes -}}
{{- if not (kindIs "invalid" $value) -}}
{{- with include "spillway.sizeProblem" (dict "path" $path "value" $value "least" (ternary (get $least $path) 1 (hasKey $least $path))) -}}
{{- include "spillway.problem" (dict "problems" $problems "text" .) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* The gateway's settings that are sizes, as section.key. */}}
{{- define "spillway.gatewaySizes" -}}
- limits.bodyBytesMax
- limits.bodiesBytesMax
- limits.plainReplyBufferBytes
- limits.repliesBytesMax
- connections.headBytesMax
- connections.targetBytesMax
- connections.bodyBytesPerSecondMin
- index.bytesMax
- continuation.bytesMax
{{- end -}}

{{/* root -> bytes of redis.memory that hold KV blocks: three quarters. */}}
{{- define "spillway.redisBlockBytes" -}}
{{- div (mul (int64 (include "spillway.bytes" (dict "value" .Values.redis.memory "path" "redis.memory"))) 3) 4 -}}
{{- end -}}

{{/* bytes -> the shortest honest form: 31.3 GiB. */}}
{{- define "spillway.bytesText" -}}
{{- $bytes := int64 . -}}
{{- if ge $bytes 1099511627776 -}}{{ printf "%.1f TiB" (divf $bytes 1099511627776) }}
{{- else if ge $bytes 1073741824 -}}{{ printf "%.1f GiB" (divf $bytes 1073741824) }}
{{- else if ge $bytes 1048576 -}}{{ printf "%.1f MiB" (divf $bytes 1048576) }}
{{- else -}}{{ $bytes }} B
{{- end -}}
{{- end -}}

{{/* bytes -> a Kubernetes quantity, rounded up to a MiB. */}}
{{- define "spillway.quantity" -}}
{{ div (add (int64 .) 1048575) 1048576 }}Mi
{{- end -}}

{{/* (resources, path) -> a container's resources; memory as people write sizes. */}}
{{- define "spillway.resources" -}}
{{- range $kind := list "requests" "limits" }}
{{- $given := get $.resources $kind }}
{{ $kind }}:
  {{- with $given.cpu }}
  cpu: {{ . | quote }}
  {{- end }}
  {{- with $given.memory }}
  memory: {{ include "spillway.quantity" (include "spillway.bytes" (dict "value" . "path" (printf "%s.%s.memory" $.path $kind))) }}
  {{- end }}
  {{- with $given.ephemeralStorage }}
  ephemeral-storage: {{ include "spillway.quantity" (include "spillway.bytes" (dict "value" . "path" (printf "%s.%s.ephemeralStorage" $.path $kind))) }}
  {{- end }}
{{- end }}
{{- end -}}
