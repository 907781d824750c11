{{/* Values that Kubernetes would take, and that would not work: each refusal says what to do. */}}
{{- define "boost.traps" -}}
{{- include "boost.traps.names" . -}}
{{- include "boost.traps.network" . -}}
{{- include "boost.traps.pods" . -}}
{{- include "boost.traps.redis" . -}}
{{- include "boost.traps.kuberay" . -}}
{{- end -}}

{{- define "boost.traps.names" -}}
{{- $name := include "boost.fullname" . -}}
{{- if not (regexMatch "^[a-z]([a-z0-9-]*[a-z0-9])?$" $name) -}}
{{- fail (printf "the objects of release %s would be named %s, which is no DNS label; set fullnameOverride to lower case letters, digits and hyphens that begin with a letter" .Release.Name $name) -}}
{{- end -}}
{{- $once := list -}}
{{- range .Values.ray.workerGroups -}}
{{- $once = append $once (printf "ray.workerGroups: two are named %s; rename one" .name) -}}
{{- end -}}
{{- range .Values.tenantSecrets -}}
{{- $once = append $once (printf "tenantSecrets: two of the tenant %s are named %s; rename one" .tenant .name) -}}
{{- end -}}
{{- range .Values.data -}}
{{- $path := trimSuffix "/" .mountPath -}}
{{- $once = append $once (printf "data: two are named %s; rename one" .name) -}}
{{- $once = append $once (printf "data: two are mounted at %s; change the mountPath of one" $path) -}}
{{- /* Where the chart itself mounts something, and above. */ -}}
{{- if regexMatch "^/(tmp|dev(/shm)?|home(/boost)?|etc|etc/boost(/.*)?|var|var/lib|var/lib/boost(-checkpoints)?)$" $path -}}
{{- fail (printf "data: %s is mounted at %s, where the pods have their own files; change its mountPath, for example to /data/%s" .name .mountPath .name) -}}
{{- end -}}
{{- end -}}
{{- range $place, $said := $once -}}
{{- if has $said (slice $once 0 $place) -}}{{- fail $said -}}{{- end -}}
{{- end -}}
{{- range list "RAY_AUTH_MODE" "RAY_AUTH_TOKEN_PATH" -}}
{{- if hasKey $.Values.env . -}}
{{- fail (printf "env.%s: the chart itself sets this variable; where another value is needed, set it in a podSpec" .) -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{- define "boost.traps.network" -}}
{{- if and .Values.networkPolicy.egress.enabled (not .Values.networkPolicy.enabled) -}}
{{- fail "networkPolicy.egress.enabled is true, but networkPolicy.enabled is false, so nothing is closed; set both" -}}
{{- end -}}
{{- if .Values.networkPolicy.enabled -}}
{{- $network := .Values.networkPolicy -}}
{{- $inside := true -}}
{{- range $network.clients -}}
{{- $pods := .podSelector | default dict -}}
{{- if or (hasKey . "namespaceSelector") .ipBlock $pods.matchLabels $pods.matchExpressions -}}{{- $inside = false -}}{{- end -}}
{{- end -}}
{{- $outside := .Values.ingress.enabled | ternary "ingress.enabled" (.Values.httpRoute.enabled | ternary "httpRoute.enabled" "") -}}
{{- if and (not $outside) (ne .Values.service.type "ClusterIP") -}}{{- $outside = printf "service.type %s" .Values.service.type -}}{{- end -}}
{{- if and $outside $inside -}}
{{- fail (printf "%s lets people in from outside, but networkPolicy.clients admits no others than the pods of this namespace; name where they come from, such as the namespace of the Ingress controller (namespaceSelector) or your networks (ipBlock)" $outside) -}}
{{- end -}}
{{- if and (or .Values.monitoring.serviceMonitor.enabled .Values.monitoring.scrapeConfig.enabled) (not $network.prometheus) -}}
{{- fail "monitoring is on, but networkPolicy.prometheus names no Prometheus, so none reaches the API and the ranks; name its namespace, such as {namespaceSelector: {matchLabels: {kubernetes.io/metadata.name: monitoring}}}" -}}
{{- end -}}
{{- if and (not .Values.ray.enabled) (not $network.rayNodes) -}}
{{- fail "the API is a node of the Ray cluster at ray.address, but networkPolicy.rayNodes admits none of the others; name them" -}}
{{- end -}}
{{- $needs := "" -}}
{{- if include "boost.usesPostgres" . -}}{{- $needs = "database.existingSecret" -}}{{- end -}}
{{- range $name := list "otlpEndpoint" "trackingUris" "checkpointRoot" -}}
{{- $away := regexReplaceAll "//(localhost|127\\.|\\[::1\\])" (get $.Values.config $name | toString) "" -}}
{{- if regexMatch "\\b(https?|s3)://" $away -}}{{- $needs = printf "config.%s" $name -}}{{- end -}}
{{- end -}}
{{- if and .Values.ray.enabled .Values.ray.autoscaler.enabled -}}{{- $needs = "ray.autoscaler.enabled" -}}{{- end -}}
{{- with .Values.ray.gcsFaultTolerance.redisAddress -}}{{- $needs = "ray.gcsFaultTolerance.redisAddress" -}}{{- end -}}
{{- if and $network.egress.enabled $needs (not $network.egress.allow) -}}
{{- fail (printf "networkPolicy.egress.enabled keeps the pods to each other, but %s needs more; name in networkPolicy.egress.allow what the pods reach: the database, the object store, the collector of traces and, for the autoscaler, Kubernetes' API" $needs) -}}
{{- end -}}
{{- range .Values.ray.workerGroups -}}
{{- if and $.Values.ray.enabled .hostNetwork (not $network.rayNodes) -}}
{{- fail (printf "ray.workerGroups: %s is in its nodes' network (hostNetwork), which no podSelector finds, so the head would not admit it; name the nodes' addresses in networkPolicy.rayNodes, such as {ipBlock: {cidr: 10.0.0.0/16}}" .name) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{- define "boost.traps.pods" -}}
{{- $ports := splitList "-" .Values.config.rankMetricsPorts -}}
{{- if or (gt (int (first $ports)) (int (last $ports))) (gt (int (last $ports)) 65535) -}}
{{- fail (printf "config.rankMetricsPorts is %s; give two ports up to 65535, the smaller first, such as 9400-9499" .Values.config.rankMetricsPorts) -}}
{{- end -}}
{{- with .Values.api -}}
{{- if ge (int .drainSeconds) (int .terminationGracePeriodSeconds) -}}
{{- fail (printf "api.drainSeconds is %d, but a replica is ended after api.terminationGracePeriodSeconds, %d; leave it time after the drain to answer running requests" (int .drainSeconds) (int .terminationGracePeriodSeconds)) -}}
{{- end -}}
{{- if and .autoscaling.enabled (gt (int .autoscaling.minReplicas) (int .autoscaling.maxReplicas)) -}}
{{- fail (printf "api.autoscaling: minReplicas (%d) must not exceed maxReplicas (%d)" (int .autoscaling.minReplicas) (int .autoscaling.maxReplicas)) -}}
{{- end -}}
{{- include "boost.traps.podSpec" (dict "of" "api" "podSpec" .podSpec) -}}
{{- include "boost.traps.sharedMemory" (dict "of" "api" "shared" .sharedMemory "memory" .resources.limits.memory) -}}
{{- end -}}
{{- include "boost.traps.podSpec" (dict "of" "ray.head" "podSpec" .Values.ray.head.podSpec) -}}
{{- include "boost.traps.sharedMemory" (dict "of" "ray.head" "shared" .Values.ray.head.sharedMemory "memory" .Values.ray.head.resources.limits.memory) -}}
{{- range .Values.ray.workerGroups -}}
{{- $of := printf "ray.workerGroups: %s" .name -}}
{{- if gt (int .minReplicas) (int .maxReplicas) -}}
{{- fail (printf "%s: minReplicas (%d) must not exceed maxReplicas (%d)" $of (int .minReplicas) (int .maxReplicas)) -}}
{{- end -}}
{{- if and (hasKey . "replicas") (or (gt (int .replicas) (int .maxReplicas)) (lt (int .replicas) (int .minReplicas))) -}}
{{- fail (printf "%s: replicas (%d) must be from minReplicas (%d) to maxReplicas (%d)" $of (int .replicas) (int .minReplicas) (int .maxReplicas)) -}}
{{- end -}}
{{- include "boost.traps.podSpec" (dict "of" $of "podSpec" (.podSpec | default dict)) -}}
{{- include "boost.traps.sharedMemory" (dict "of" $of "shared" (.sharedMemory | default "8Gi") "memory" .memory) -}}
{{- end -}}
{{- end -}}

{{/* The chart's own containers are of one version, which is said once. */}}
{{- define "boost.traps.podSpec" -}}
{{- $of := .of -}}
{{- range .podSpec.containers -}}
{{- if and (has .name (list "api" "ray-head" "ray-worker")) (hasKey . "image") -}}
{{- fail (printf "%s: podSpec sets the image of the container %s, which would be of another version than the rest; set image.registry, image.tag and image.digest, or image.trainerTag and image.trainerDigest" $of .name) -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* What lies in a pod's shared memory counts for its memory, and a pod that is over its limit is ended. */}}
{{- define "boost.traps.sharedMemory" -}}
{{- if gt (include "boost.bytes" .shared | float64) (include "boost.bytes" .memory | float64) -}}
{{- fail (printf "%s: sharedMemory (%s) must not exceed the memory (%s), of which it is a part" .of .shared .memory) -}}
{{- end -}}
{{- end -}}

{{/* A quantity of Kubernetes in bytes. */}}
{{- define "boost.bytes" -}}
{{- $units := dict "" 1 "m" 0.001 "k" 1e3 "M" 1e6 "G" 1e9 "T" 1e12 "P" 1e15 "Ki" 1024 "Mi" 1048576 "Gi" 1073741824 "Ti" 1099511627776 "Pi" 1125899906842624 "E" 1e18 "Ei" 1152921504606846976 -}}
{{- if kindIs "string" . -}}
{{- mulf (regexFind "^[0-9.]+" .) (get $units (regexFind "[A-Za-z]*$" .)) -}}
{{- else -}}
{{- float64 . -}}
{{- end -}}
{{- end -}}

{{- define "boost.traps.redis" -}}
{{- $redis := .Values.ray.gcsFaultTolerance -}}
{{- if and $redis.redisAddress (not .Values.ray.enabled) -}}
{{- fail (printf "ray.gcsFaultTolerance.redisAddress is %s, but the head of the cluster at ray.address is not this chart's; set it there, or ray.enabled" $redis.redisAddress) -}}
{{- end -}}
{{- if and $redis.redisAddress (not $redis.existingSecret) -}}
{{- fail (printf "the Redis at %s would have no password, and who writes to it has code run by the cluster; set ray.gcsFaultTolerance.existingSecret to a Secret that holds one" $redis.redisAddress) -}}
{{- end -}}
{{- if and $redis.existingSecret (not $redis.redisAddress) -}}
{{- fail "ray.gcsFaultTolerance.existingSecret is the password of no Redis; set ray.gcsFaultTolerance.redisAddress to its host:6379" -}}
{{- end -}}
{{- end -}}

{{/* A release of KubeRay is known by what it serves, which everybody may see: 1.6 brought RayCronJob, and upgradeStrategy. */}}
{{- define "boost.traps.kuberay" -}}
{{- $served := .Capabilities.APIVersions -}}
{{- if and .Values.ray.enabled ($served.Has "ray.io/v1/RayCluster") (not ($served.Has "ray.io/v1/RayCronJob")) -}}
{{- fail "KubeRay's custom resources here are older than 1.6 and lack upgradeStrategy, without which Ray's nodes stay at another version than the API; upgrade the operator and its CRDs" -}}
{{- end -}}
{{- end -}}
