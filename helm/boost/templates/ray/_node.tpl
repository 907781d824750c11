{{/* The pod of a Ray node. KubeRay writes its command. Given: root, role, resources, and what differs. */}}

{{- define "boost.rayPodSpec" -}}
{{- include "boost.pullSecrets" .root }}
serviceAccountName: {{ include "boost.serviceAccount" (dict "root" .root "role" .role) }}
automountServiceAccountToken: false
enableServiceLinks: false
{{- if .root.Values.ray.autoscaler.enabled }}
restartPolicy: Never # the autoscaler replaces nodes
{{- end }}
terminationGracePeriodSeconds: {{ .terminationGracePeriodSeconds }}
securityContext: {{- include "boost.podSecurity" .root | nindent 2 }}
{{- if .hostNetwork }}
hostNetwork: true
dnsPolicy: ClusterFirstWithHostNet # or it would not find the head's Service
{{- end }}
{{- with .nodeSelector }}
nodeSelector: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .tolerations }}
tolerations: {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}

{{- define "boost.rayContainer" -}}
image: {{ include "boost.image.trainer" .root }}
imagePullPolicy: {{ .root.Values.image.pullPolicy }}
env:
  {{- include "boost.env.common" .root | nindent 2 }}
  {{- include "boost.env.ray" .root | nindent 2 }}
{{- include "boost.envFrom" .root }}
resources: {{- toYaml .resources | nindent 2 }}
{{- $security := include "boost.containerSecurity" .root | fromYaml }}
securityContext: {{- mergeOverwrite $security (.securityContext | default dict) | toYaml | nindent 2 }}
{{- end -}}

{{/* Merge podSpec into a pod of Ray, in place, unless KubeRay would then refuse the whole cluster. Given: root, of, spec, podSpec. */}}
{{- define "boost.openRayPod" -}}
{{- include "boost.openPod" . -}}
{{- $policy := .spec.restartPolicy | default "Never" -}}
{{- if and .root.Values.ray.autoscaler.enabled (ne $policy "Never") -}}
{{- fail (printf "%s: podSpec.restartPolicy is %s, with which KubeRay refuses a cluster that has an autoscaler; leave it out" .of $policy) -}}
{{- end -}}
{{- $instead := dict "RAY_enable_autoscaler_v2" "ray.autoscaler.enabled" -}}
{{- range list "RAY_REDIS_ADDRESS" "REDIS_PASSWORD" "REDIS_USERNAME" "RAY_external_storage_namespace" -}}
{{- $_ := set $instead . "ray.gcsFaultTolerance" -}}
{{- end -}}
{{- range eq .of "ray.head" | ternary (first .spec.containers).env list -}}
{{- $harmless := and (eq .name "RAY_enable_autoscaler_v2") (not $.root.Values.ray.autoscaler.enabled) (has (toString .value) (list "0" "false")) -}}
{{- if and (hasKey $instead .name) (not $harmless) -}}
{{- fail (printf "env or ray.head.podSpec has %s, with which KubeRay refuses the cluster; set %s instead" .name (get $instead .name)) -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* Ray answers these without its token. A pod is ended when its agent says that Ray's node is no more; the head's dashboard,
which may be slow while it works, does not end all gangs. Given: path and port of what answers when the node is of use. */}}
{{- define "boost.rayProbes" -}}
startupProbe:
  httpGet: {path: {{ .ready }}, port: {{ .port }}}
  periodSeconds: 5
  failureThreshold: 60
livenessProbe:
  httpGet: {path: /api/local_raylet_healthz, port: 52365}
  periodSeconds: 10
  timeoutSeconds: 5
  failureThreshold: 12
readinessProbe:
  httpGet: {path: {{ .ready }}, port: {{ .port }}}
  periodSeconds: 5
  timeoutSeconds: 5
{{- end -}}

{{/* Resources of a worker, asked for and held to alike, so that ranks share with nobody. */}}
{{- define "boost.workerResources" -}}
{{- $held := merge (dict "cpu" (toString .cpu) "memory" .memory) (.extraResources | default dict) -}}
{{- if .gpus }}{{ $_ := set $held "nvidia.com/gpu" (toString .gpus) }}{{ end -}}
{{- toYaml (dict "requests" $held "limits" $held) -}}
{{- end -}}

{{/* Notice of the pod's end, until Ray's node has nothing to do any more: its gangs have gone on elsewhere, or have
written a checkpoint. The kubelet ends the wait with the grace period, which the deadline stays below. */}}
{{- define "boost.leave" -}}
ray drain-node --reason DRAIN_NODE_REASON_PREEMPTION --reason-message 'its pod is being ended'
--deadline-remaining-seconds {{ sub . 10 }} && while grep -qsx raylet /proc/[0-9]*/comm; do sleep 1; done
{{- end -}}
