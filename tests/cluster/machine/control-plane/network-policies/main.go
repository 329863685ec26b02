// kube-router's controller of NetworkPolicies alone, on a node: it keeps that node's iptables and ipsets. The program
// itself would bring a BGP daemon and a second service proxy along, and minutes of compiling.
package main

import (
	"log"
	"sync"

	"github.com/cloudnativelabs/kube-router/v2/pkg/controllers/netpol"
	"github.com/cloudnativelabs/kube-router/v2/pkg/healthcheck"
	"github.com/cloudnativelabs/kube-router/v2/pkg/options"
	"github.com/spf13/pflag"
	"k8s.io/client-go/informers"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/cache"
	"k8s.io/client-go/tools/clientcmd"
)

func must[T any](value T, err error) T {
	if err != nil {
		log.Fatal(err)
	}
	return value
}

func main() {
	config := options.NewKubeRouterConfig()
	config.AddFlags(pflag.CommandLine)
	pflag.Parse()
	client := must(kubernetes.NewForConfig(must(clientcmd.BuildConfigFromFlags("", config.Kubeconfig))))

	forever := make(chan struct{})
	factory := informers.NewSharedInformerFactory(client, 0)
	pods := factory.Core().V1().Pods().Informer()
	namespaces := factory.Core().V1().Namespaces().Informer()
	policies := factory.Networking().V1().NetworkPolicies().Informer()
	factory.Start(forever)
	factory.WaitForCacheSync(forever)

	iptables, ipsets, err := netpol.NewIPTablesHandlers(config)
	if err != nil {
		log.Fatal(err)
	}
	controller := must(netpol.NewNetworkPolicyController(
		client, config, pods, policies, namespaces, &sync.Mutex{}, iptables, ipsets))
	for informer, handler := range map[cache.SharedIndexInformer]cache.ResourceEventHandler{
		pods:       controller.PodEventHandler,
		namespaces: controller.NamespaceEventHandler,
		policies:   controller.NetworkPolicyEventHandler,
	} {
		must(informer.AddEventHandler(handler))
	}

	beats := make(chan *healthcheck.ControllerHeartbeat)
	go func() {
		for range beats { // nothing asks whether it is well
		}
	}()
	var running sync.WaitGroup
	running.Add(1)
	controller.Run(beats, forever, &running)
}
