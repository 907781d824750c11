{{/* What the schema cannot say, because it is about several values: each refusal says what to do. */}}
{{- define "boost.refusals" -}}
{{- if not (include "boost.usesPostgres" .) -}}
{{- if gt (int .Values.api.replicas) 1 -}}
{{- fail (printf "api.replicas is %d, but SQLite serves one replica; set database.existingSecret to a Secret with the URL of a PostgreSQL, or api.replicas to 1" (int .Values.api.replicas)) -}}
{{- end -}}
{{- if .Values.api.autoscaling.enabled -}}
{{- fail "api.autoscaling.enabled is true, but SQLite serves one replica; set database.existingSecret to a Secret with the URL of a PostgreSQL" -}}
{{- end -}}
{{- end -}}
{{- $version := .Values.image.tag | default .Chart.AppVersion -}}
{{- with .Values.image.trainerTag -}}
{{- $variant := trimPrefix (printf "%s-" $version) . -}}
{{- $preRelease := regexMatch "^((rc|alpha|beta|dev|pre)[.-]?[0-9]*([.-]|$)|[ab][0-9]([.-]|$)|[0-9]{8}|$)" $variant -}}
{{- if and (ne . $version) (or (eq . $variant) $preRelease) -}}
{{- fail (printf "image.trainerTag is %s, but the API's tag is %s: both images are of one version; set it to %s, or to a variant of it such as %s-cpu" . $version $version $version) -}}
{{- end -}}
{{- end -}}
{{- if and (not .Values.ray.enabled) (not .Values.ray.address) -}}
{{- fail "there is no Ray: the API's image cannot train; set ray.enabled, or ray.address to a cluster's host:6379" -}}
{{- end -}}
{{- if and .Values.ray.enabled .Values.ray.address -}}
{{- fail (printf "ray.address is %q, but ray.enabled makes a cluster; set one of the two" .Values.ray.address) -}}
{{- end -}}
{{- if and (not .Values.ray.enabled) (not .Values.ray.token.existingSecret) -}}
{{- fail "the Ray cluster at ray.address has a token; set ray.token.existingSecret to a Secret that holds it" -}}
{{- end -}}
{{- if and .Values.ray.enabled (not (kindIs "invalid" .Values.config.autoscaling)) -}}
{{- fail "config.autoscaling is about the Ray cluster at ray.address; set ray.autoscaler.enabled for the chart's own" -}}
{{- end -}}
{{- if and (not .Values.checkpoints.volume.enabled) (not .Values.config.checkpointRoot) -}}
{{- fail "there is no place for checkpoints that all nodes share; set config.checkpointRoot to s3://…, or checkpoints.volume.enabled" -}}
{{- end -}}
{{- if and .Values.ingress.enabled (not (and .Values.ingress.host .Values.ingress.tlsSecret)) -}}
{{- fail "ingress.enabled needs ingress.host and ingress.tlsSecret, because keys travel in requests" -}}
{{- end -}}
{{- if and .Values.httpRoute.enabled (not (and .Values.httpRoute.host .Values.httpRoute.parentRefs)) -}}
{{- fail "httpRoute.enabled needs httpRoute.host and httpRoute.parentRefs, the https listener of a Gateway, because keys travel in requests" -}}
{{- end -}}
{{- $gangs := .Values.ray.gangScheduling -}}
{{- if and (eq $gangs.by "kueue") (not $gangs.queue) -}}
{{- fail "ray.gangScheduling.by is kueue; set ray.gangScheduling.queue to a LocalQueue of this namespace" -}}
{{- end -}}
{{- if and (eq $gangs.by "kueue") .Values.ray.autoscaler.enabled -}}
{{- fail "Kueue admits a Ray cluster of one size; set ray.autoscaler.enabled to false, or ray.gangScheduling.by to volcano or none" -}}
{{- end -}}
{{- if and (or .Values.monitoring.serviceMonitor.enabled .Values.monitoring.scrapeConfig.enabled) (not .Values.monitoring.existingSecret) -}}
{{- fail "Prometheus needs an API key; make one (boost keys create prometheus --tenant ops --scope admin), put it into a Secret and set monitoring.existingSecret" -}}
{{- end -}}
{{- range $name, $scraped := pick .Values.monitoring "serviceMonitor" "scrapeConfig" -}}
{{- if and $scraped.enabled $.Values.monitoring.rules.enabled (gt (include "boost.seconds" $scraped.interval | float64) 120.0) -}}
{{- fail (printf "monitoring.%s.interval is %s, but rules look at five minutes, in which there have to be two scrapes even if one fails; set it to 2m or less" $name $scraped.interval) -}}
{{- end -}}
{{- end -}}
{{- if and .Values.monitoring.rules.enabled (not .Values.monitoring.rules.runbookBase) -}}
{{- fail "each alert links to its page of docs/runbooks; publish that folder where people on call can read it, and set monitoring.rules.runbookBase to its URL" -}}
{{- end -}}
{{- include "boost.traps" . -}}
{{- end -}}
