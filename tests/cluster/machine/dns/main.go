// CoreDNS with the plugins of a cluster's own names alone: all of them would take longer to compile than Kubernetes.
package main

import (
	"github.com/coredns/coredns/core/dnsserver"
	"github.com/coredns/coredns/coremain"
	_ "github.com/coredns/coredns/plugin/bind"
	_ "github.com/coredns/coredns/plugin/cache"
	_ "github.com/coredns/coredns/plugin/kubernetes"
	_ "github.com/coredns/coredns/plugin/reload"
)

func init() {
	// In the order in which a query meets them.
	dnsserver.Directives = []string{"reload", "bind", "cache", "kubernetes"}
}

func main() {
	coremain.Run()
}
