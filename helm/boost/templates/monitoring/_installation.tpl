{{/* Which of several installations in one Prometheus and one Grafana a rule or a dashboard is about: see deploy/build.py. */}}
{{- define "boost.ofInstallation" -}}
{{- $root := .root -}}
{{- $name := printf "%s/%s" $root.Release.Namespace $root.Release.Name -}}
{{- $text := .text | replace "@uid@" (sha256sum $name | trunc 8) -}}
{{- $text = $text | replace "@namespace@" $root.Release.Namespace | replace "@release@" $root.Release.Name -}}
{{- $full := include "boost.fullname" $root -}}
{{- $text = $text | replace "@name@" $full | replace "@claim@" (include "boost.checkpointsClaim" $root) -}}
{{- /* KubeRay's names of pods begin with 50 letters of the cluster's name, a hyphen and the group's. */}}
{{- $groups := list }}{{ range $root.Values.ray.workerGroups }}{{ $groups = append $groups (trunc (int (sub 49 (len $full))) .name) }}{{ end }}
{{- $text = $text | replace "@groups@" (join "|" $groups) -}}
{{- $text | replace "@price@" (toString $root.Values.monitoring.dashboards.gpuHourPrice) -}}
{{- end -}}

{{/* The labels that all series of an installation have. */}}
{{- define "boost.installationLabels" -}}
- {action: replace, targetLabel: namespace, replacement: {{ .Release.Namespace }}}
- {action: replace, targetLabel: release, replacement: {{ .Release.Name }}}
{{- end -}}

{{/* A duration in whole seconds. */}}
{{- define "boost.seconds" -}}
{{- $units := dict "ms" 0.001 "s" 1 "m" 60 "h" 3600 -}}
{{- $seconds := 0.0 -}}
{{- range regexFindAll "[0-9]+(ms|s|m|h)" . -1 -}}
{{- $seconds = addf $seconds (mulf (regexFind "^[0-9]+" .) (get $units (regexFind "[a-z]+$" .))) -}}
{{- end -}}
{{- ceil $seconds -}}
{{- end -}}
