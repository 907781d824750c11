{{/* What all pods have in common. */}}

{{- define "boost.podSecurity" -}}
runAsNonRoot: true
runAsUser: 65532
runAsGroup: 65532
fsGroup: 65532
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
