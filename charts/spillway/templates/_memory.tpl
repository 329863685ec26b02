{{/*
How large a pod has to be: the arithmetic of services/engine/src/spillway_engine/memory_budget.py, before anything is
scheduled, and on top of it the pod's own share: processes, staging, page cache and margin.
tests/chart/test_memory.py holds the figures to those of the engine service and of `spillway check`.
*/}}

{{/* (engine, path, root, out): the model's shape, from values or files/model-shapes.yaml, into out. */}}
{{- define "spillway.shape" -}}
{{- $given := .engine.model.shape -}}{{- $out := .out -}}
{{- $known := .root.Files.Get "files/model-shapes.yaml" | fromYaml -}}
{{- $file := base .engine.model.path | lower -}}{{- $plain := trimPrefix "meta-" $file -}}
{{- $forms := .root.spillwayNames.modelNames -}}
{{- $name := hasKey $known $file | ternary $file (regexReplaceAll $forms.endings $plain "") -}}
{{- include "spillway.overlay" (dict "base" $out "over" (dict "dtype" "bfloat16" "weightBytes" 0)) -}}
{{- include "spillway.overlay" (dict "base" $out "over" (get $known (default $name $given.preset) | default dict)) -}}
{{- /* Quantised weights, in eighths of those in 16 bits: embeddings stay as they are. */ -}}
{{- $ending := trimPrefix $name $plain -}}{{- $eighths := 0 -}}
{{- range $form, $share := $forms.eighths -}}
{{- if regexMatch $form $ending -}}{{- $eighths = max $eighths $share -}}{{- end -}}
{{- end -}}
{{- if and $eighths (hasPrefix $name $plain) (not $given.preset) -}}
{{- $_ := set $out "quantized" true -}}
{{- $_ = set $out "weightBytes" (div (mul (int64 $out.weightBytes) $eighths) 8) -}}
{{- end -}}
{{- range $key := list "layers" "slidingLayers" "kvHeads" "headDim" "latentDim" "dtype" "weightBytes" -}}
{{- $value := get $given $key -}}
{{- if not (has (toString $value) (list "<nil>" "")) -}}
{{- $_ := set $out $key $value -}}
{{- if or (eq $key "kvHeads") (eq $key "headDim") -}}{{- $_ = unset $out "latentDim" -}}{{- end -}}
{{- if eq $key "layers" -}}{{- $_ = unset $out "slidingLayers" -}}{{- end -}}
{{- if has $key (list "layers" "kvHeads" "headDim" "latentDim") -}}
{{- $_ = unset $out "stateLayers" -}}{{- $_ = unset $out "packed" -}}{{- end -}}
{{- end -}}{{- end -}}
{{- $_ := set $out "slidingLayers" (min (int64 $out.slidingLayers) (int64 $out.layers)) -}}
{{- /* If tokens are drafted, draftLayers is set, even to 0. */ -}}
{{- $drafter := include "spillway.drafter" (default list .engine.extraArgs) | fromJson -}}
{{- if $drafter.speculates -}}
{{- $_ := set $out "draftLayers" (kindIs "invalid" $given.draftLayers | ternary $drafter.layers $given.draftLayers) -}}
{{- end -}}
{{- include "spillway.rule.shape" (dict "path" .path "engine" .engine "shape" $out) -}}
{{- end -}}

{{/* engine -> workers of one pod; each has a device of its own. */}}
{{- define "spillway.ranks" -}}
{{- div (mul (int64 .tensorParallelSize) (int64 .pipelineParallelSize) (int64 .dataParallelSize))
  (int64 .nodesPerReplica) -}}
{{- end -}}

{{/* (engine, path, platform, shape, names, out): every figure of one pod's memory into out. */}}
{{- define "spillway.memory" -}}
{{- $engine := .engine -}}{{- $shape := .shape -}}{{- $path := .path -}}{{- $onCpu := eq .platform "cpu" -}}
{{- $elementBytes := dict "bfloat16" 2 "float16" 2 "float32" 4 -}}{{- $dtype := $engine.model.dtype -}}
{{- if eq $dtype "auto" -}}
{{- /* A CPU engine takes bfloat16 where the core has it: reckon with the larger. */ -}}
{{- $ownDtype := ternary $shape.dtype "bfloat16" (has $shape.dtype (list "bfloat16" "float16")) -}}
{{- $dtype = ternary "float32" $ownDtype $onCpu -}}
{{- end -}}
{{- $kvDtype := ternary $dtype $engine.model.kvCacheDtype (eq $engine.model.kvCacheDtype "auto") -}}
{{- /* Of the KV cache: its own dtype, and the scales that some keep for each head. */ -}}
{{- $kvElement := get $elementBytes $kvDtype | default 1 -}}
{{- $scale := ternary 4 0 (hasSuffix "_per_token_head" $kvDtype) -}}
{{- /* Every data parallel rank is an engine core with a device cache, a CPU tier, weights and queues. */ -}}
{{- $stages := int64 $engine.pipelineParallelSize -}}{{- $ranks := mul (int64 $engine.tensorParallelSize) $stages -}}
{{- $cores := max 1 (div (int64 $engine.dataParallelSize) (int64 $engine.nodesPerReplica)) -}}
{{- $allRanks := include "spillway.ranks" $engine | int64 -}}
{{- /* Of a core that spans pods, these ranks and their share of the weights are here. */ -}}
{{- $ranksHere := max 1 (div $allRanks $cores) -}}
{{- /* A row of the CPU tier holds one KV group. vLLM makes groups of one size out of layers of two kinds: of the
      smaller kind's, or of the larger's where it is less than half as large again. */ -}}
{{- $sliding := int64 $shape.slidingLayers -}}
{{- $full := sub (add (int64 $shape.layers) (int64 $shape.draftLayers)) $sliding -}}
{{- $fewer := min $full $sliding -}}{{- $more := max $full $sliding -}}
{{- $states := int64 $shape.stateLayers -}}
{{- if $states -}}{{- $fewer = min $full $states -}}{{- $more = max $full $states -}}{{- end -}}
{{- $groupLayers := ternary $more $fewer (or (eq $fewer 0) (lt (mul 2 $more) (mul 3 $fewer))) -}}
{{- $rounding := sub $groupLayers 1 -}}{{- $groups := 0 -}}{{- $whole := 0 -}}{{- $kinds := list -}}
{{- range $kind := list (list $full 0) (list $sliding (int64 $shape.slidingWindow)) (list $states -1) -}}
{{- $count := div (add (first .) $rounding) $groupLayers -}}{{- $groups = add $groups $count -}}
{{- $kinds = append $kinds (list $count (last .)) -}}
{{- if eq 0 (last . | int) -}}{{- $whole = add $whole $count -}}{{- end -}}{{- end -}}
{{- /* Of the stage with the most layers: in a row every stage has its room. All ranks of a stage hold the same latents
      (MLA), and a tier holds them once. */ -}}
{{- $layers := div (add $groupLayers (sub $stages 1)) $stages -}}
{{- $rankTokenBytes := mul $layers (int64 $shape.latentDim) $kvElement -}}
{{- $rowTokenBytes := mul $rankTokenBytes $stages -}}
{{- if not $shape.latentDim -}}
{{- $heads := max 1 (div (int64 $shape.kvHeads) (int64 $engine.tensorParallelSize)) -}}
{{- $rankTokenBytes = mul 2 $layers $heads (add (mul (int64 $shape.headDim) $kvElement) $scale) -}}
{{- $rowTokenBytes = mul $rankTokenBytes $ranks -}}
{{- end -}}
{{- /* vLLM raises the block until a layer's page holds a state; what it packs in its own way is known. */ -}}
{{- $blockSize := int64 $engine.blockSize -}}
{{- if $states -}}{{- $pageBytes := mul (div $rankTokenBytes $layers) $blockSize -}}
{{- $stateBytes := div (int64 $shape.stateBytes) (int64 $engine.tensorParallelSize) -}}
{{- $blockSize = mul (div (add $stateBytes (sub $pageBytes 1)) $pageBytes) $blockSize -}}{{- end -}}
{{- $blockBytes := mul $rankTokenBytes $blockSize -}}{{- $rowBlockBytes := mul $rowTokenBytes $blockSize -}}
{{- with get .names.packedModels (default "" $shape.packed) -}}
{{- $blockSize = int64 .blockTokens -}}{{- $blockBytes = int64 .blockBytes -}}{{- $groups = len .groups -}}
{{- $rowBlockBytes = mul (int64 .rowBytes) $stages -}}{{- $whole = 1 -}}{{- $kinds = .groups -}}
{{- end -}}

{{- /* Device cache and weights. On a CPU both are this pod's memory. */ -}}
{{- $deviceBlocks := int64 $engine.deviceBlocks -}}
{{- if and $onCpu (not $deviceBlocks) -}}
{{- $longest := div (add (int64 $engine.model.maxLength) (sub $blockSize 1)) $blockSize -}}
{{- $deviceBlocks = add1 (mul 4 $longest $groups) -}}
{{- end -}}
{{- $deviceBytes := ternary (mul $deviceBlocks $blockBytes $allRanks) 0 $onCpu -}}
{{- $coreWeights := include "spillway.bytes" (dict "value" $shape.weightBytes
  "path" (printf "%s.model.shape.weightBytes" $path)) | int64 -}}
{{- /* Quantised weights stay as the files have them, or become smaller. */ -}}
{{- if not (or $engine.model.quantization $shape.quantized) -}}
{{- $coreWeights = div (mul $coreWeights (get $elementBytes $dtype)) (get $elementBytes $shape.dtype | default 2) -}}
{{- end -}}
{{- $coreWeights = div (mul $coreWeights $ranksHere) $ranks -}}
{{- $weightBytes := ternary (mul $coreWeights $cores) 0 $onCpu -}}
{{- $asked := include "spillway.argumentMemory" (dict "arguments" (default list $engine.extraArgs) "onCpu" $onCpu
  "ranks" $ranksHere "cores" $cores "weightBytes" $coreWeights) | fromJson -}}
{{- $askedBytes := int64 $asked.processBytes -}}

{{- /* CPU tier: rows of one chunk of one KV group over all ranks, rounded up to a page. */ -}}
{{- $offload := $engine.offload -}}{{- $tier := $offload.sharedTier -}}
{{- $chunkTokens := mul $blockSize (int64 $offload.blocksPerChunk) -}}
{{- $chunkBytes := mul $rowBlockBytes (int64 $offload.blocksPerChunk) -}}
{{- $rowBytes := mul (div (add $chunkBytes 4095) 4096) 4096 -}}{{- $chunks := 0 -}}
{{- if and $offload.enabled $offload.numCpuBlocks -}}{{- $chunks = int64 $offload.numCpuBlocks -}}
{{- else if and $offload.enabled $offload.cpuBytes -}}
{{- $chunks = div (include "spillway.bytes" (dict "value" $offload.cpuBytes
  "path" (printf "%s.offload.cpuBytes" $path)) | int64) $rowBytes -}}
{{- end -}}
{{- /* Of the node's tier a process has page tables alone: 8 bytes for each page of 4 KiB. */ -}}
{{- $nodeBytes := 0 -}}
{{- if and $offload.enabled $offload.nodeTier.enabled -}}
{{- $nodeBytes = include "spillway.bytes" (dict "value" $offload.nodeTier.bytes
  "path" (printf "%s.offload.nodeTier.bytes" $path)) | int64 -}}
{{- if eq $offload.nodeTier.fallback "refuse" -}}{{- $chunks = 0 -}}{{- end -}}
{{- end -}}
{{- $tableBytes := mul (div $nodeBytes 512) (add $allRanks $cores) -}}
{{- $tierBytes := mul $chunks $rowBytes $cores -}}
{{- /* vLLM's own queues: about 40 MiB for the server and each rank are touched, 160 + 240 per rank are mapped. */ -}}
{{- $sharedAsked := int64 $asked.sharedBytes -}}
{{- $queueBytes := add (mul 41943040 (add1 $ranksHere) $cores) $sharedAsked -}}
{{- $sharedNeeded := add $tierBytes $queueBytes -}}
{{- $mapped := add (mul $cores (add 167772160 (mul 251658240 $ranksHere))) $sharedAsked -}}
{{- $shared := div (mul (add $tierBytes $mapped) 110) 100 -}}
{{- with $engine.memory.sharedMemory -}}
{{- $shared = include "spillway.bytes" (dict "value" . "path" (printf "%s.memory.sharedMemory" $path)) | int64 -}}
{{- end -}}
{{- /* Every engine core keeps copies of the index of slabs: 104 bytes for each slot, which is a row, or a row and a
      page. Each thread of a tier has a chunk in flight, one on its way to or from the store, and a sealed one. */ -}}
{{- $indexBytes := 0 -}}{{- $stagingBytes := 0 -}}
{{- if and $offload.enabled (ne $tier.type "none") -}}
{{- $stagingBytes = mul (int64 $tier.ioThreads) (ternary 3 2 $tier.encryption.enabled) $rowBytes $cores -}}
{{- $below := ternary 0 (int64 $tier.below.ioThreads) (eq $tier.below.type "none") -}}
{{- $stagingBytes = add $stagingBytes (mul $below (ternary 4 3 $tier.encryption.enabled) $rowBytes $cores) -}}
{{- end -}}
{{- if and $offload.enabled (has "nvme" (list $tier.type $tier.below.type)) -}}
{{- $stagingBytes = add $stagingBytes (include "spillway.bytes" (dict "value" $engine.memory.pageCache
  "path" (printf "%s.memory.pageCache" $path)) | int64) -}}
{{- $most := include "spillway.nvmeMaxBytes" (dict "item" (dict "engine" $engine "path" $path)) | int64 -}}
{{- if and $most (ne $tier.nvme.mode "files") -}}
{{- $indexBytes = mul (add (mul (div $most $rowBytes) 104) 2097152) $cores -}}
{{- end -}}{{- end -}}

{{- /* What the engine itself reckons with at its start, and what this pod reserves. */ -}}
{{- $onHost := add $sharedNeeded $deviceBytes $weightBytes $askedBytes $indexBytes $tableBytes -}}
{{- $engineNeeds := add (mul 2411724800 $allRanks) $onHost -}}
{{- $ownProcess := get .names.processPerRank (ternary "onCpu" "onDevice" $onCpu) -}}
{{- $process := default $ownProcess $engine.memory.processPerRank -}}
{{- $processBytes := mul $allRanks (include "spillway.bytes" (dict "value" $process
  "path" (printf "%s.memory.processPerRank" $path)) | int64) -}}
{{- $margin := int64 $engine.memory.marginPercent -}}{{- $sum := add $onHost $processBytes $stagingBytes -}}
{{- $needed := max $engineNeeds (div (mul $sum (add 100 $margin)) 100) -}}{{- $limit := $needed -}}
{{- with $engine.memory.limit -}}
{{- $limit = include "spillway.bytes" (dict "value" . "path" (printf "%s.memory.limit" $path)) | int64 -}}
{{- end -}}
{{- $rows := printf "CPU tier (%d x %s)" (mul $chunks $cores) (include "spillway.bytesText" $rowBytes) -}}
{{- $parts := list $rows $tierBytes "queues" $queueBytes
  (eq $allRanks 1 | ternary "process" (printf "%d processes" $allRanks)) $processBytes
  "device blocks" $deviceBytes "weights" $weightBytes "buffers of the shared tier" $stagingBytes
  "its index" $indexBytes "extraArgs" $askedBytes "page tables of the node's tier" $tableBytes -}}
{{- $texts := list -}}
{{- range $at := untilStep 0 (len $parts) 2 -}}
{{- $bytes := index $parts (add1 $at | int) -}}
{{- if or $bytes (lt $at 6) -}}
{{- $texts = append $texts (printf "%s %s" (index $parts $at) (include "spillway.bytesText" $bytes)) -}}
{{- end -}}{{- end -}}
{{- $arithmetic := printf "%s + %d %% margin = %s" (join " + " $texts) $margin
  (include "spillway.bytesText" $needed) -}}

{{- /* bytesPerToken: what each further token of a prompt adds to a load. groups: number, tokens of the window (-1:
      states), tokens of a block if it has fewer; `spillway plan` counts by them what a prompt stores. */ -}}
{{- include "spillway.overlay" (dict "base" .out "over" (dict "dtype" $dtype "kvDtype" $kvDtype
  "bytesPerToken" (div (mul $rowBlockBytes (default $groups $whole)) $blockSize)
  "bytesPerBlock" (mul $rowBlockBytes $groups)
  "chunkTokens" $chunkTokens "cpuChunks" $chunks "cpuRowBytes" $rowBytes "cpuTierBytes" $tierBytes
  "sharedMemoryNeededBytes" $sharedNeeded "sharedMemoryBytes" $shared "engineNeedsBytes" $engineNeeds
  "podNeedsBytes" $needed "memoryLimitBytes" $limit "arithmetic" $arithmetic)) -}}
{{- range $key, $value := dict "deviceBlocks" (list $deviceBlocks 0) "dataParallelRanks" (list $cores 1)
  "kvGroups" (list $groups 1) "tierIndexBytes" (list $indexBytes 0) "nodeTierBytes" (list $nodeBytes 0) -}}
{{- if gt (int64 (first $value)) (last $value | int64) -}}{{- $_ := set $.out $key (first $value) -}}{{- end -}}
{{- end -}}
{{- if hasKey $shape "draftLayers" -}}{{- $_ := set .out "draftLayers" (int64 $shape.draftLayers) -}}{{- end -}}
{{- $_ := set .out (eq 1 (int $groups) | ternary "cpuTierTokens" "groups")
  (eq 1 (int $groups) | ternary (mul $chunks $chunkTokens) $kinds) -}}
{{- end -}}

{{/* arguments of vLLM -> JSON: their values by name, of each the last one. -sc is short for --speculative-config. */}}
{{- define "spillway.arguments" -}}
{{- $given := dict -}}{{- $waiting := "" -}}
{{- range . -}}
{{- $name := regexReplaceAll "^-sc\\b" (regexReplaceAll "(?s)=.*$" . "" | replace "_" "-") "--speculative-config" -}}
{{- if $waiting -}}{{- $_ := set $given $waiting . -}}{{- end -}}
{{- $_ := set $given $name (contains "=" . | ternary (regexReplaceAll "(?s)^[^=]*=" . "") "") -}}
{{- $waiting = contains "=" . | ternary "" $name -}}
{{- end -}}
{{- toJson $given -}}
{{- end -}}

{{/* arguments of vLLM -> JSON: speculates, and layers of the drafter, by
services/engine/src/spillway_engine/drafters.py. */}}
{{- define "spillway.drafter" -}}
{{- $given := include "spillway.arguments" . | fromJson -}}{{- $speculates := false -}}
{{- range $name, $value := $given -}}
{{- if regexMatch "^(--speculative-config([.].*)?|--spec-(method|model|tokens))$" $name -}}
{{- $speculates = true -}}{{- end -}}
{{- end -}}
{{- $config := get $given "--speculative-config" | default "{}" | fromJson -}}
{{- $found := dict -}}
{{- range $key := list "method" "model" -}}
{{- $named := get $given (print "--speculative-config." $key) | default (get $given (print "--spec-" $key)) -}}
{{- $_ := set $found $key (default (get $config $key | default "") $named | toString) -}}
{{- end -}}
{{- $of := default (lower $found.model) $found.method -}}{{- $hasOne := regexMatch "eagle|dflash|mtp$" $of -}}
{{- dict "speculates" $speculates "layers" (ternary 3 (ternary 1 0 $hasOne) (contains "dspark" $of)) | toJson -}}
{{- end -}}

{{/* (arguments, onCpu, ranks, cores, weightBytes) -> JSON: processBytes, sharedBytes: the host memory that arguments of
vLLM ask for, by services/engine/src/spillway_engine/argument_memory.py. Of an argument the last value counts. */}}
{{- define "spillway.argumentMemory" -}}
{{- $given := include "spillway.arguments" .arguments | fromJson -}}
{{- $number := dict -}}
{{- range list "--cpu-offload-gb" "--offload-group-size" "--offload-num-in-group" "--mm-processor-cache-gb" -}}
{{- $text := get $given . -}}
{{- $isNumber := regexMatch "^[+]?([0-9]+[.]?[0-9]*|[.][0-9]+)([eE][-+]?[0-9]+)?$" $text -}}
{{- if and $isNumber (lt (float64 $text) 1048576.0) -}}{{- $_ := set $number . (float64 $text) -}}{{- end -}}
{{- end -}}
{{- $kept := 0 -}}{{- $shared := 0 -}}
{{- $group := get $number "--offload-group-size" | default 0.0 | int64 -}}
{{- if .onCpu -}}
{{- else if and (gt $group 0) (ne "uva" (get $given "--offload-backend")) -}}
{{- $layers := min $group (max 1 (get $number "--offload-num-in-group" | default 1.0 | int64)) -}}
{{- $kept = mul (div (mul .weightBytes $layers) $group) .cores -}}
{{- else -}}
{{- $kept = mul (mulf (get $number "--cpu-offload-gb" | default 0.0) 1073741824.0 | int64) .ranks .cores -}}
{{- end -}}
{{- if and (not .onCpu) (hasKey $given "--enable-sleep-mode") -}}
{{- $kept = add $kept (mul .weightBytes .cores) -}}
{{- end -}}
{{- $cache := get $number "--mm-processor-cache-gb" -}}
{{- if eq "shm" (get $given "--mm-processor-cache-type") -}}
{{- $shared = mulf (hasKey $number "--mm-processor-cache-gb" | ternary $cache 4.0) 1073741824.0 | int64 -}}
{{- else -}}
{{- $kept = add $kept (mul (mulf (default 0.0 $cache) 1073741824.0 | int64) (add1 .cores)) -}}
{{- end -}}
{{- dict "processBytes" $kept "sharedBytes" $shared | toJson -}}
{{- end -}}
