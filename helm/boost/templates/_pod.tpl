{{/* What all pods have in common. */}}

{{/* No versions are in it: what changes here replaces all of Ray's pods (upgradeStrategy). Given: root, component, of. */}}
{{- define "boost.podMetadata" -}}
labels:
  {{- include "boost.selector" . | nindent 2 }}
  {{- with merge dict (.of.podLabels | default dict) .root.Values.commonLabels }}{{ toYaml . | nindent 2 }}{{ end }}
{{- with .of.podAnnotations }}
annotations: {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}

{{- define "boost.podSecurity" -}}
runAsNonRoot: true
{{- range $field, $id := .Values.podSecurityContext }}
{{- if not (kindIs "invalid" $id) }}
{{ $field }}: {{ int64 $id }}
{{- end }}
{{- end }}
fsGroupChangePolicy: OnRootMismatch
seccompProfile:
  type: RuntimeDefault
{{- end -}}

{{- define "boost.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
runAsNonRoot: true
capabilities:
  drop: [ALL]
{{- end -}}

{{- define "boost.pullSecrets" -}}
{{- with .Values.image.pullSecrets }}
imagePullSecrets:
{{- range . }}
  - name: {{ . }}
{{- end }}
{{- end }}
{{- end -}}

{{/* Where nodes of Ray write, the API's pods being some of them; and what all of them read at the same places. */}}
{{- define "boost.sharedVolumes" -}}
- name: tmp
  emptyDir: {}
- name: user-home
  emptyDir: {}
- name: shared-mem
  emptyDir:
    medium: Memory
    sizeLimit: {{ .sharedMemory }}
- name: ray-token
  secret:
    secretName: {{ include "boost.rayTokenSecret" .root }}
    defaultMode: 0440
    items:
      - key: {{ .root.Values.ray.token.key }}
        path: token
{{- if .root.Values.checkpoints.volume.enabled }}
- name: checkpoints
  persistentVolumeClaim:
    claimName: {{ include "boost.checkpointsClaim" .root }}
{{- end }}
{{- range .root.Values.data }}
- name: data-{{ .name }}
  persistentVolumeClaim:
    claimName: {{ .claim }}
    readOnly: true
{{- end }}
{{- range .root.Values.tenantSecrets }}
- name: {{ include "boost.tenantSecretVolume" . }}
  secret:
    secretName: {{ .existingSecret }}
    defaultMode: 0440
    optional: true # without it only jobs that name it fail, not every pod of the installation
{{- end }}
{{- end -}}

{{- define "boost.sharedMounts" -}}
- name: tmp
  mountPath: /tmp
- name: user-home
  mountPath: /home/boost
- name: shared-mem
  mountPath: /dev/shm
- name: ray-token
  mountPath: /etc/boost/ray
  readOnly: true
{{- if .Values.checkpoints.volume.enabled }}
- name: checkpoints
  mountPath: /var/lib/boost-checkpoints
{{- end }}
{{- range .Values.data }}
- name: data-{{ .name }}
  mountPath: {{ .mountPath }}
  readOnly: true
{{- end }}
{{- range .Values.tenantSecrets }}
- name: {{ include "boost.tenantSecretVolume" . }}
  mountPath: /etc/boost/secrets/{{ .tenant }}/{{ .name }}
  readOnly: true
{{- end }}
{{- end -}}

{{/* A volume's name has no room for a tenant's and a secret's. */}}
{{- define "boost.tenantSecretVolume" -}}
secret-{{ printf "%s/%s" .tenant .name | sha256sum | trunc 12 }}
{{- end -}}

{{- define "boost.checkpointsClaim" -}}
{{- .Values.checkpoints.volume.existingClaim | default (printf "%s-checkpoints" (include "boost.fullname" .)) -}}
{{- end -}}

{{- define "boost.databaseClaim" -}}
{{- .Values.database.sqlite.existingClaim | default (printf "%s-database" (include "boost.fullname" .)) -}}
{{- end -}}

{{/* Merge podSpec into a pod that the chart has made, in place. Beside privileged and CAP_SYS_ADMIN Kubernetes refuses
allowPrivilegeEscalation: false. Given: of, spec, podSpec. */}}
{{- define "boost.openPod" -}}
{{- include "boost.mergeInto" (dict "into" .spec "from" .podSpec) -}}
{{- $of := .of -}}
{{- $pod := .spec.securityContext | default dict -}}
{{- range concat .spec.containers (.spec.initContainers | default list) -}}
{{- $own := .securityContext | default dict -}}
{{- $added := dig "capabilities" "add" list $own -}}
{{- if or $own.privileged (has "SYS_ADMIN" $added) (has "CAP_SYS_ADMIN" $added) -}}
{{- $_ := unset $own "allowPrivilegeEscalation" -}}
{{- end -}}
{{- $user := dig "runAsUser" (dig "runAsUser" "" $pod) $own | toString -}}
{{- if and (eq $user "0") (dig "runAsNonRoot" (dig "runAsNonRoot" false $pod) $own) -}}
{{- fail (printf "%s: the container %s has runAsUser 0 beside runAsNonRoot true, with which it never starts; set runAsNonRoot to false, too" $of .name) -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* Merge one object of Kubernetes into another, in place, as `kubectl patch` does: maps key by key, these lists item by item
where the items are of one name, and all other values and lists as a whole; null removes. Given: into, from. */}}
{{- define "boost.mergeInto" -}}
{{- $named := dict "containers" "name" "initContainers" "name" "volumes" "name" "env" "name" "imagePullSecrets" "name"
    "volumeMounts" "mountPath" "ports" "containerPort" "topologySpreadConstraints" "topologyKey" -}}
{{- $into := .into -}}
{{- range $key, $value := .from -}}
{{- $there := get $into $key -}}
{{- if kindIs "invalid" $value -}}
{{- $_ := unset $into $key -}}
{{- else if and (kindIs "map" $value) (kindIs "map" $there) -}}
{{- include "boost.mergeInto" (dict "into" $there "from" $value) -}}
{{- else if and (hasKey $named $key) (kindIs "slice" $there) -}}
{{- include "boost.mergeItems" (dict "into" $into "list" $key "by" (get $named $key) "from" $value) -}}
{{- else -}}
{{- $_ := set $into $key (deepCopy $value) -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* Merge items into the list of an object: into those of the same name, or behind them. Given: into, list, by, from. */}}
{{- define "boost.mergeItems" -}}
{{- $by := .by -}}
{{- $items := get .into .list -}}
{{- range $item := .from -}}
{{- $same := dict -}}
{{- range $items -}}{{- if eq (get . $by | toString) (get $item $by | toString) -}}{{- $same = . -}}{{- end -}}{{- end -}}
{{- if $same -}}
{{- include "boost.mergeInto" (dict "into" $same "from" $item) -}}
{{- else -}}
{{- $items = append $items (deepCopy $item) -}}
{{- end -}}
{{- end -}}
{{- $_ := set .into .list $items -}}
{{- end -}}
