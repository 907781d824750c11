{{/* The pod of Ray's head, as KubeRay wants it. */}}
{{- define "boost.headTemplate" -}}
{{- $ray := .Values.ray }}
metadata: {{- include "boost.podMetadata" (dict "root" . "component" "head" "of" $ray.head) | nindent 2 }}
spec:
  {{- $head := merge (dict "root" . "role" "head") $ray.head }}
  {{- include "boost.rayPodSpec" $head | nindent 2 }}
  containers:
    - name: ray-head
      {{- include "boost.rayContainer" $head | nindent 6 }}
      ports:
        - {name: gcs-server, containerPort: 6379, protocol: TCP}
        - {name: dashboard, containerPort: 8265, protocol: TCP}
        - {name: client, containerPort: 10001, protocol: TCP}
      {{- include "boost.rayProbes" (dict "ready" "/api/gcs_healthz" "port" 8265) | nindent 6 }}
      volumeMounts: {{- include "boost.sharedMounts" . | nindent 8 }}
  volumes:
    {{- include "boost.sharedVolumes" (dict "root" . "sharedMemory" $ray.head.sharedMemory) | nindent 4 }}
    {{- if $ray.autoscaler.enabled }}
    - name: kubernetes-api
      projected:
        defaultMode: 0440
        sources:
          - serviceAccountToken: {path: token, expirationSeconds: 3600}
          - configMap: {name: kube-root-ca.crt, items: [{key: ca.crt, path: ca.crt}]}
          - downwardAPI: {items: [{path: namespace, fieldRef: {fieldPath: metadata.namespace}}]}
    {{- end }}
{{- end -}}

{{/* A kind of worker nodes, as KubeRay wants it. Given: root, and the group of the values. */}}
{{- define "boost.workerGroup" -}}
{{- $root := .root }}
{{- with .group }}
{{- $grace := .terminationGracePeriodSeconds | default 120 }}
{{- $worker := dict "root" $root "role" "workers" "terminationGracePeriodSeconds" $grace
    "nodeSelector" .nodeSelector "tolerations" .tolerations
    "resources" (include "boost.workerResources" . | fromYaml) "securityContext" .securityContext
    "hostNetwork" .hostNetwork }}
groupName: {{ .name }}
replicas: {{ .replicas | default .minReplicas }}
minReplicas: {{ .minReplicas }}
maxReplicas: {{ .maxReplicas }}
{{- if $root.Values.ray.autoscaler.enabled }}
scaleStrategy: # the autoscaler replaces this list, which has to be there
  workersToDelete: []
{{- end }}
{{- with .labels }}
labels: {{- toYaml . | nindent 2 }}
{{- end }}
rayStartParams:
  object-store-memory: "134217728"
template:
  metadata: {{- include "boost.podMetadata" (dict "root" $root "component" "worker" "of" .) | nindent 4 }}
  spec:
    {{- include "boost.rayPodSpec" $worker | nindent 4 }}
    containers:
      - name: ray-worker
        {{- include "boost.rayContainer" $worker | nindent 8 }}
        {{- if .hostNetwork }}
        ports: # two pods with one port of a node are not placed on it
          - {name: agent, containerPort: 52365, protocol: TCP}
        {{- end }}
        {{- include "boost.rayProbes" (dict "ready" "/api/local_raylet_healthz" "port" 52365) | nindent 8 }}
        lifecycle:
          preStop:
            exec:
              command: [/bin/bash, -c, {{ include "boost.leave" $grace | replace "\n" " " | quote }}]
        volumeMounts: {{- include "boost.sharedMounts" $root | nindent 10 }}
    volumes:
      {{- include "boost.sharedVolumes" (dict "root" $root "sharedMemory" (.sharedMemory | default "8Gi")) | nindent 6 }}
{{- end }}
{{- end -}}

{{/* The cluster that is installed; nothing while there is none, or where nothing can be looked up (helm template, GitOps). */}}
{{- define "boost.liveCluster" -}}
{{- dig "spec" dict (lookup "ray.io/v1" "RayCluster" .Release.Namespace (include "boost.fullname" .)) | toYaml -}}
{{- end -}}

{{/* Kubernetes takes the list of groups as one value: whoever applies it states all of it, also what the autoscaler and
KubeRay have set. So that stays as it is: an upgrade does not resize the cluster, and has no conflict with anybody about a
list that it does not change. Given: root, the group of the values, and the live one, which may be empty. */}}
{{- define "boost.liveSize" -}}
{{- range $field, $value := pick .live "numOfHosts" "priority" "scaleStrategy" "suspend" }}
{{ $field }}: {{ $value | toJson }}
{{- end }}
{{- if and .root.Values.ray.autoscaler.enabled (hasKey .live "replicas") }}
replicas: {{ min (max (int .live.replicas) (int .group.minReplicas)) (int .group.maxReplicas) }}
{{- end }}
{{- end -}}

{{/* A pod template as it is to be, with what Kueue has added to the live one where it has admitted the cluster. Given: root,
template, and live, which may be empty. */}}
{{- define "boost.admitted" -}}
{{- $template := .template -}}
{{- if eq .root.Values.ray.gangScheduling.by "kueue" -}}
{{- $added := dict "metadata" (pick (dig "metadata" dict .live) "labels" "annotations")
    "spec" (pick (dig "spec" dict .live) "nodeSelector" "schedulingGates") -}}
{{- $tolerations := concat (dig "spec" "tolerations" list $template) (dig "spec" "tolerations" list .live) | uniq -}}
{{- $template = merge $template $added -}}
{{- with $tolerations }}{{ $_ := set $template.spec "tolerations" . }}{{ end -}}
{{- end -}}
{{- toYaml $template -}}
{{- end -}}
